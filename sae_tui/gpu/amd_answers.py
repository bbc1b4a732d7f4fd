"""Asks AMD SMI, whose answers are tables in which "N/A", or a number of all ones, stands for what is not supported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from sae_tui.gpu import amd_faults as faults

# What ROCm 6.0 passes on as it is, and later versions write as "N/A": all bits of a field set.
_UNSUPPORTED = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})


class Asking:
    """Calls functions of the module by name; keeps which fields failed since `begin`, and the last error's number."""

    def __init__(self, smi: ModuleType) -> None:
        self._smi: Any = smi
        self.failed: dict[str, str] = {}
        self.code: int | None = None

    def begin(self) -> None:
        """Forget what failed."""
        self.failed, self.code = {}, None

    def get(self, field: str, function: str, *arguments: Any) -> Any:
        """Return the answer; None for what is not supported and, noted as a fault of `field`, for what fails."""
        try:
            return getattr(self._smi, function)(*arguments)
        except self._smi.AmdSmiLibraryException as error:
            if error.err_code not in faults.MISSING:
                self.code = error.err_code
                self.failed[field] = faults.sensor(error.err_code)
        except (AttributeError, self._smi.AmdSmiException):  # another version, or another version's arguments
            pass
        except (UnicodeDecodeError, ValueError):  # a text that is none, a serial number that is no number
            self.failed[field] = "unexpected answer"
        return None

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the answer; None for whatever is not told."""
        return self.get(function, function, *arguments)


def number(answer: Any, *keys: str, least: float = 0) -> float | None:
    """Return the first of these entries that is a number of at least `least`; else None."""
    table = answer if isinstance(answer, Mapping) else {}
    for value in map(table.get, keys):
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and value not in _UNSUPPORTED
            and least <= value < math.inf
        ):
            return value
    return None

"""Calls AMD SMI. In the dicts that AMD SMI returns, "N/A" or a number with all bits set means "not supported"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from sae_tui.gpu import amd_faults as faults

# Numbers with all bits set, which ROCm 6.0 returns instead of "N/A".
_UNSUPPORTED = frozenset({0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF})


class Asking:
    """Calls AMD SMI functions by name; records the last error code and all failed fields since `begin`."""

    def __init__(self, smi: ModuleType) -> None:
        self._smi: Any = smi
        self.failed: dict[str, str] = {}
        self.code: int | None = None

    def begin(self) -> None:
        """Clear the recorded failures."""
        self.failed, self.code = {}, None

    def get(self, field: str, function: str, *arguments: Any) -> Any:
        """Call a function; return its result, or None if it is unsupported or fails. Record a failure for `field`."""
        try:
            return getattr(self._smi, function)(*arguments)
        except self._smi.AmdSmiLibraryException as error:
            if error.err_code not in faults.MISSING:
                self.code = error.err_code
                self.failed[field] = faults.sensor(error.err_code)
        except (AttributeError, self._smi.AmdSmiException):  # This AMD SMI lacks the function or these arguments.
            pass
        except (UnicodeDecodeError, ValueError):  # Text is not UTF-8, or a serial number is not a number.
            self.failed[field] = "unexpected response"
        return None

    def ask(self, function: str, *arguments: Any) -> Any:
        """Call a function; return its result, or None if it is unsupported or fails."""
        return self.get(function, function, *arguments)


def number(answer: Any, *keys: str, least: float = 0) -> float | None:
    """Return the first number under these keys in `answer` that is at least `least`, or None."""
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

"""Which GPUs CUDA_VISIBLE_DEVICES leaves to a process: the same cards for app, shell commands and trainer.

Numbers in it are those of nvidia-smi, which counts by PCI bus. CUDA itself counts so only with
CUDA_DEVICE_ORDER=PCI_BUS_ID, and without it may put the fastest card first; ranks are started with that order set, and
by UUID.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
Cards = Sequence[tuple[int, str]]


def visible_devices() -> str | None:
    """What the environment says; None where every GPU may be used."""
    return os.environ.get(VARIABLE)


def visible_indices(text: str | None, cards: Iterable[tuple[int, str]]) -> list[int]:
    """The cards that are left, by index, in the order of the list; `cards` are all there are, as (index, UUID).

    As CUDA reads it: numbers, or UUIDs that may be cut short; the list ends before the first entry that names no card,
    and one that names a card twice names none. Instances of a split card (`MIG-...`) are no cards.
    """
    known = list(cards)
    if text is None:
        return [index for index, _ in known]
    look_up: Callable[[str, Cards], int | None] = _by_uuid if text.strip().startswith("GPU-") else _by_number
    found: list[int] = []
    for entry in text.split(","):
        index = look_up(entry.strip(), known)
        if index is None:
            break
        if index in found:
            return []
        found.append(index)
    return found


def _by_number(entry: str, cards: Cards) -> int | None:
    """Digits count as far as they go, so that `1st` is 1."""
    digits = re.match(r"\+?(\d{1,9})(?!\d)", entry)
    return next((index for index, _ in cards if digits and index == int(digits[1])), None)


def _by_uuid(entry: str, cards: Cards) -> int | None:
    """A beginning that only one card has."""
    if not entry.startswith("GPU-"):
        return None
    found = [index for index, uuid in cards if uuid.lower().startswith(entry.lower())]
    return found[0] if len(found) == 1 else None

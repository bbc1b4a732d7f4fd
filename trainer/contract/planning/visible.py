"""Which GPUs CUDA_VISIBLE_DEVICES leaves to a process: the same cards for app, shell commands and trainer.

Numbers in it are read as those of nvidia-smi, which counts by PCI bus. CUDA itself counts so only with
CUDA_DEVICE_ORDER=PCI_BUS_ID, and without it may put the fastest card first; ranks are started with that order set and
with UUIDs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
Cards = Sequence[tuple[int, str]]


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES as the environment has it; None where it is not set and every GPU may be used."""
    return os.environ.get(VARIABLE)


def visible_indices(text: str | None, cards: Iterable[tuple[int, str]]) -> list[int]:
    """Return the indices of the cards that the variable's `text` leaves, in its order, of all `cards` (index, UUID).

    Entries are read as CUDA reads them: numbers, or UUIDs that may be shortened; the list ends before the first entry
    that names no card, and a list that names a card twice is empty. Instances of a split card (`MIG-...`) are no cards.
    """
    all_cards = list(cards)
    if text is None:
        return [index for index, _ in all_cards]
    look_up: Callable[[str, Cards], int | None] = _by_uuid if text.strip().startswith("GPU-") else _by_number
    indices: list[int] = []
    for entry in text.split(","):
        index = look_up(entry.strip(), all_cards)
        if index is None:
            break
        if index in indices:
            return []
        indices.append(index)
    return indices


def _by_number(entry: str, cards: Cards) -> int | None:
    """Find a card by the number that an entry begins with, so that `1st` is 1; None where there is none."""
    digits = re.match(r"\+?(\d{1,9})(?!\d)", entry)
    return next((index for index, _ in cards if digits and index == int(digits[1])), None)


def _by_uuid(entry: str, cards: Cards) -> int | None:
    """Find the card whose UUID begins with the entry; None where no card, or more than one, does."""
    if not entry.startswith("GPU-"):
        return None
    indices = [index for index, uuid in cards if uuid.lower().startswith(entry.lower())]
    return indices[0] if len(indices) == 1 else None

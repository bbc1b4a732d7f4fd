"""Formats the memory use of each part of a rank as a dictionary, or as a table with a bar."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from trainer.contract.planning.memory import Memory
from trainer.contract.planning.memory_bar import LETTERS, cells

_BAR_WIDTH = 74


def parts_of(memory: Memory) -> dict[str, int]:
    """Return a dict mapping each part's name to its size in bytes, with the sum under `total`."""
    return msgspec.structs.asdict(memory) | {"total": memory.total}


def table(memory: Memory) -> Iterator[str]:
    """Yield a line for each part and for the total, and then a bar showing all parts."""
    for name, n_bytes in parts_of(memory).items():
        yield f"  {LETTERS.get(name, ' ')} {name:<14}{n_bytes / 2**20:>10,.1f} MiB"
    widths = cells(memory, _BAR_WIDTH)
    yield f"  [{''.join(LETTERS[name] * n_cells for name, n_cells in widths.items())}]"

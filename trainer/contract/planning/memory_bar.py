"""Computes a memory bar: the letter and the number of cells for each part of a memory estimate."""

from __future__ import annotations

from itertools import accumulate

import msgspec

from trainer.contract.planning.memory import Memory

# E means exchange, and R means reserve. C means the CUDA context or, on the CPU, the process itself.
LETTERS = {
    "weights": "W",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "communication": "E",
    "slack": "R",
    "context": "C",
}


def cells(parts: Memory, width: int) -> dict[str, int]:
    """Divide `width` cells among the non-empty parts in proportion to their bytes.

    Each boundary between parts is at most half a cell from its exact position. Parts smaller than a cell are therefore
    summed until they fill one: the part that fills it gets the cell, and the parts before it get none.
    """
    sizes = {name: n_bytes for name, n_bytes in msgspec.structs.asdict(parts).items() if n_bytes > 0}
    ends = [round(width * n_bytes / parts.total) for n_bytes in accumulate(sizes.values())]
    return {name: end - start for name, start, end in zip(sizes, [0, *ends], ends, strict=False)}

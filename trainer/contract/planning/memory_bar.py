"""Computes a memory bar: the letter and the number of cells for each part of a memory estimate."""

from __future__ import annotations

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
    """Divide `width` cells among the parts in proportion to their bytes, with at least one cell per non-empty part.

    If there are more non-empty parts than cells, some parts get no cell.
    """
    sizes = {name: n_bytes for name, n_bytes in msgspec.structs.asdict(parts).items() if n_bytes > 0}
    widths = {name: max(1, round(width * n_bytes / parts.total)) for name, n_bytes in sizes.items()}
    while widths and (excess := sum(widths.values()) - width):
        widest = max(widths, key=lambda name: widths[name])
        widths[widest] -= 1 if excess > 0 else -1
    return widths

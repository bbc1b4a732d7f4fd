"""A memory estimate as a bar of cells: the letter of every part, and how wide each is."""

from __future__ import annotations

import msgspec

from trainer.contract.planning.memory import Memory

# E as exchange, R as reserve, C as CUDA or, on the CPU, as the code of the process.
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
    """How many of `width` cells each part takes; one that takes any memory has at least one where there is room."""
    found = {name: n_bytes for name, n_bytes in msgspec.structs.asdict(parts).items() if n_bytes > 0}
    widths = {name: max(1, round(width * n_bytes / parts.total)) for name, n_bytes in found.items()}
    while widths and (excess := sum(widths.values()) - width):
        widest = max(widths, key=lambda name: widths[name])
        widths[widest] -= 1 if excess > 0 else -1
    return widths

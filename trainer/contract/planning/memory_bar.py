"""Draws a memory estimate as a bar of cells: the letter and the number of cells of every part."""

from __future__ import annotations

import msgspec

from trainer.contract.planning.memory import Memory

# E for exchange, R for reserve, C for CUDA or, on the CPU, the process itself.
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
    """Divide `width` cells among the parts by their bytes; each part above 0 gets at least one if the width allows."""
    sizes = {name: n_bytes for name, n_bytes in msgspec.structs.asdict(parts).items() if n_bytes > 0}
    widths = {name: max(1, round(width * n_bytes / parts.total)) for name, n_bytes in sizes.items()}
    while widths and (excess := sum(widths.values()) - width):
        widest = max(widths, key=lambda name: widths[name])
        widths[widest] -= 1 if excess > 0 else -1
    return widths

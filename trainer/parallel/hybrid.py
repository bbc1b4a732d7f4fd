"""Groups of ranks that share the latents, and more tokens for each group."""

from __future__ import annotations

from trainer.parallel.grid import Grid


class Hybrid(Grid):
    """`ddp` over rows of ranks, each of which is `tensor`."""

"""A full replica on every rank; gradients are summed over ranks once per step."""

from __future__ import annotations

from trainer.parallel.grid import Grid


class Ddp(Grid):
    """A grid of one column: explicit sums rather than DistributedDataParallel, for a sparse backward pass is too short
    to hide transfers in."""

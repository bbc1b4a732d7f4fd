"""Every rank has the whole batch and some latents, with their share of the optimizer's state."""

from __future__ import annotations

from trainer.parallel.grid import Grid


class TensorParallel(Grid):
    """A grid of one row: candidates for the largest activations and partial reconstructions are exchanged, gradients
    of weights never."""

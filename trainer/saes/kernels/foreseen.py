"""Chooses the pre-activations above a bound on a GPU, whose host does not know how many there are.

A step that waited for their number would leave the GPU without work. So the host makes room for as many as it expects
from the batches before, and takes the largest: where fewer are above the bound, some below it come with them, which
take no part in loss or gradient. Where more are, activations are lost. The host learns of that one batch later; but
the values chosen are NaN then, so that the step is skipped as any step without a finite gradient, and nothing wrong is
ever learnt. The next batches get the dense product, for which no room is needed and which tells the true number.

The host reads the number of the batch before once this one's product is queued. Behind that number the GPU then has a
backward pass, an update and the product to do: it never stands still, and the host is at most a step ahead of it.

Each rank decides by its own numbers: either product needs the same exchange with other ranks.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.contract.planning import latent_room
from trainer.runtime.device_queue import HostCopy
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import Chosen, places_of

# From so many batches the number of the next is expected to be the largest; where that is the last's, to have grown as
# that one has.
MEMORY = 4


class _Batch(NamedTuple):
    """A batch: its tokens, for how many values there was room (None: for all), how many were not below the bound."""

    n_tokens: int
    room: int | None
    n_above: HostCopy


class Foresight:
    """Makes room for the values of a batch that are above a bound, by how many were in those before."""

    def __init__(self) -> None:
        self._above: deque[float] = deque(maxlen=MEMORY)
        self._before: _Batch | None = None
        # Whether there was too little room for the last batch, 0-dim bool; None before the first.
        self.overflowed: Tensor | None = None

    def above(self, pre_acts: PreActs, bound: Tensor | float) -> Chosen | None:
        """Choose the values above a bound (a number or [d_sae]), every NaN, and some below it; NaN if there are more.

        Return None where a dense product is faster, or nothing is known yet.
        """
        # Before the host reads anything.
        matrix = pre_acts.matrix
        n_tokens, d_sae = matrix.shape
        size = self._room(n_tokens, d_sae)
        if size is None:
            chosen, n_above = None, (matrix >= bound).sum()
            self.overflowed = torch.zeros_like(n_above, dtype=torch.bool)
        else:
            chosen, n_above = largest_above(pre_acts, bound, size)
            self.overflowed = n_above == size
        self._before = _Batch(n_tokens, size, HostCopy(n_above))
        return chosen

    def _room(self, n_tokens: int, d_sae: int) -> int | None:
        """Return how many values to take of a batch; None for all of them.

        What is known from the batches before is in no checkpoint, and sparse products round other than dense ones do:
        in deterministic mode a resumed run would not go on with the same bits.
        """
        self._learn()
        if len(self._above) < MEMORY or not n_tokens or torch.are_deterministic_algorithms_enabled():
            return None
        # At first every batch has more than those before: with 24,576 latents half as many again.
        *before, last = self._above
        growth = max(1.0, last / max(1.0, *before))
        per_token = latent_room.per_token(growth * max(self._above), d_sae)
        return per_token * n_tokens if per_token else None

    def _learn(self) -> None:
        """Take in the number of the batch before; begin anew where there was too little room for it."""
        if (before := self._before) is None:
            return
        n_above = int(before.n_above.read())
        if n_above == before.room:
            self._above.clear()
        elif before.n_tokens:
            self._above.append(n_above / before.n_tokens)


def largest_above(pre_acts: PreActs, bound: Tensor | float, n: int) -> tuple[Chosen, Tensor]:
    """Choose the n values that exceed a bound the most, or fall short of it the least, and every NaN.

    Return also how many are not below it, 0-dim int64. Where these are all n others may be missing, and the values are
    NaN.
    """
    matrix = pre_acts.matrix
    if isinstance(bound, Tensor):
        # Rounded to the type of the matrix, which keeps the sign: above the bound it is never less than 0.
        distances = PreActs(torch.sub(matrix, bound, out=torch.empty_like(matrix)))
        flat, excess = distances.largest_of_all(n)
        values = matrix.flatten().index_select(0, flat)
    else:
        flat, values = pre_acts.largest_of_all(n)
        excess = values - bound
    # False of a NaN, which has to pass for what it is and not for too little room.
    n_above = (excess >= 0).sum()
    return (places_of(flat, *pre_acts.shape), values.where(n_above < n, torch.nan)), n_above

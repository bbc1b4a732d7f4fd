"""Chooses the pre-activations above a bound on a GPU, whose host does not know how many there are.

A step that waited for their number would leave the GPU without work. So the host makes room for as many as it expects
from the steps before, and takes the largest: where fewer are above the bound, some below it come with them, which take
no part in loss or gradient. Where more are, activations are lost. The host learns of that one step later; but the
values chosen are NaN then, so that the step is skipped as any step without a finite gradient, and nothing wrong is
ever learnt. The next steps get the dense product, for which no room is needed and which tells the true number.

The host reads the number of the step before once this one's first product is queued. Behind that number the GPU then
has a backward pass, an update and the product to do: it never stands still, and the host is at most a step ahead of it.
A step's other micro-batches go by the same numbers, since that of the one before was queued just now. The weights are
the same for all of them, so that a step counts as the largest of its micro-batches.

Where steps are recorded, it has to decide before it queues anything. Then it leaves the last step's number unread, so
that the GPU still has that whole step to do, and learns of too little room two steps later.

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

# From so many steps the number of the next is expected to be the largest; where that is the last's, to have grown as
# that one has. Where it has grown by more than a quarter there is room for all: in the first steps of a run half as
# many again may be active from one to the next, and a step that lacks room is lost.
MEMORY, MOST_GROWTH = 4, 1.25
# Where steps are recorded, room shrinks once so many of them had no need of it: L0 swings about its target, and of 400
# steps of each architecture (4,096 latents, k 8) 379 or more could so be replayed, of standard 153 otherwise.
SHRINKS_AFTER = 100


class _Batch(NamedTuple):
    """A batch: its tokens, for how many values there was room (None: for all), how many were not below the bound."""

    n_tokens: int
    room: int | None
    n_above: HostCopy


class _Ahead(NamedTuple):
    """What was decided before a pass was queued: for how many values there is room, None for all."""

    room: int | None


class _Pass(NamedTuple):
    """A pass that was decided on beforehand; each time it is replayed it writes `n_above` anew, 0-dim."""

    n_tokens: int
    room: int | None
    n_above: Tensor


class Foresight:
    """Makes room for the values of a batch that are above a bound, by how many were in those of the steps before."""

    def __init__(self) -> None:
        self._above: deque[float] = deque(maxlen=MEMORY)
        # The batches of the step that is being queued, and those of steps whose numbers the host has not read yet.
        self._of_step: list[_Batch] = []
        self._unread: deque[list[_Batch]] = deque()
        # Where steps are recorded: how many of a token were expected, and for how many there was room last.
        self._expected: deque[float] = deque(maxlen=SHRINKS_AFTER)
        self._per_token: int | None = None
        self._ahead: _Ahead | None = None
        self._pass: _Pass | None = None
        # Whether there was too little room for the last batch, 0-dim bool; None before the first.
        self.overflowed: Tensor | None = None

    def above(self, pre_acts: PreActs, bound: Tensor | float) -> Chosen | None:
        """Choose the values above a bound (a number or [d_sae]), every NaN, and some below it; NaN if there are more.

        Return None where a dense product is faster, or nothing is known yet.
        """
        # Before the host reads anything.
        matrix = pre_acts.matrix
        n_tokens, d_sae = matrix.shape
        size = self._ahead.room if self._ahead else self._room(n_tokens, d_sae)
        if size is None:
            chosen, n_above = None, (matrix >= bound).sum()
            self.overflowed = torch.zeros_like(n_above, dtype=torch.bool)
        else:
            chosen, n_above = largest_above(pre_acts, bound, size)
            self.overflowed = n_above == size
        if self._ahead:
            self._pass = _Pass(n_tokens, size, n_above)
        else:
            self._of_step.append(_Batch(n_tokens, size, HostCopy(n_above)))
        return chosen

    def decide(self, n_tokens: int, d_sae: int) -> int | None:
        """Decide for how many values of the next batch to make room, and return that; None: for all of them.

        That has to be the only one until `queued`. The number of the last step is not waited for.
        """
        self._ahead = _Ahead(self._room(n_tokens, d_sae, n_unread=1))
        return self._ahead.room

    def queued(self) -> None:
        """Note that the GPU was given a step.

        Behind a pass that was decided on, which it was given anew or once more, it copies the number. A replay writes
        over that of the one before: the copies, which are queued in between, are apart.
        """
        if self._ahead and self._pass:
            self._of_step.append(_Batch(self._pass.n_tokens, self._pass.room, HostCopy(self._pass.n_above)))
        if self._of_step:
            self._unread.append(self._of_step)
        self._of_step, self._ahead = [], None

    def _room(self, n_tokens: int, d_sae: int, n_unread: int = 0) -> int | None:
        """Return how many values to take of a batch, knowing all steps before but the last `n_unread`; None for all.

        What is known from the steps before is in no checkpoint, and sparse products round other than dense ones do:
        in deterministic mode a resumed run would not go on with the same bits.
        """
        while len(self._unread) > n_unread:
            self._learn(self._unread.popleft())
        if len(self._above) < MEMORY or not n_tokens or torch.are_deterministic_algorithms_enabled():
            return None
        *before, last = self._above
        growth = max(1.0, last / max(1.0, *before))
        if growth > MOST_GROWTH:
            return None
        expected = growth ** (1 + n_unread) * max(self._above)
        per_token = latent_room.per_token(expected, d_sae)
        if per_token and n_unread:
            # Each change of size costs recorded steps their recording.
            self._expected.append(expected)
            self._per_token = per_token = latent_room.per_token(max(self._expected), d_sae, self._per_token)
        return per_token * n_tokens if per_token else None

    def _learn(self, step: list[_Batch]) -> None:
        """Take in the numbers of a step's batches; begin anew where there was too little room for one."""
        numbers = [int(batch.n_above.read()) for batch in step]
        if any(n_above == batch.room for n_above, batch in zip(numbers, step, strict=True)):
            self._above.clear()
        elif per_token := [n / batch.n_tokens for n, batch in zip(numbers, step, strict=True) if batch.n_tokens]:
            self._above.append(max(per_token))


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

"""Selects the pre-activations above a bound on a GPU when the host does not know how many there are.

Waiting for the count would leave the GPU idle, so the host predicts a buffer size from earlier steps, and fills the
buffer with the largest values. If fewer values than the buffer holds are above the bound, some values below it are
included; they affect neither the loss nor its gradients. If more values are above the bound, activations are lost. The
host notices this overflow one step later. The selected values are set to NaN, so the step is skipped like any step with
a non-finite gradient, and the weights do not change. The next steps use the dense matmul, which needs no predicted size
and counts all values above the bound.

The host reads the previous step's count after queuing the current step's first matmul. At that time, the GPU still has
to compute a backward pass, an update and that matmul, so the GPU is never idle, and the host is at most one step ahead.
All micro-batches in a step use counts from the same earlier steps, since waiting for the preceding micro-batch would
leave the GPU idle. All micro-batches also use the same weights, so a step's count is the largest count of its
micro-batches.

With CUDA graphs, the host must choose a size before it queues anything. The host then does not wait for the last step's
count, and decides while the GPU is still busy with that step. An overflow is therefore noticed two steps later.

Each rank decides from its own counts, since sparse and dense matmuls require the same communication between ranks.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.contract.planning import latent_capacity
from trainer.runtime.device_queue import HostCopy
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import Chosen, places_of

# The predicted count is the largest count in the last `MEMORY` steps. If the latest count is the largest, its growth is
# extrapolated. If the count grew by more than the factor `MOST_GROWTH`, the dense matmul is used: in a run's first
# steps, the count may grow by half from one step to the next, and a step that overflows is wasted.
MEMORY, MOST_GROWTH = 4, 1.25
# With CUDA graphs, the buffer shrinks only after `SHRINKS_AFTER` steps in which a smaller buffer sufficed, since L0
# oscillates around its target. With this rule, at least 379 of 400 steps with 4,096 latents and k = 8 were replayed for
# each architecture; without it, only 153 steps were replayed for the standard architecture.
SHRINKS_AFTER = 100


class _ObservedBatch(NamedTuple):
    """A batch: its token count, its buffer size (None if dense), and the count of values at or above the bound."""

    n_tokens: int
    capacity: int | None
    n_above: HostCopy


class _Ahead(NamedTuple):
    """A decision made before a pass was queued: the buffer size, or None for the dense matmul."""

    capacity: int | None


class _Pass(NamedTuple):
    """A pass whose buffer size was decided in advance; each replay overwrites `n_above`, 0-dim."""

    n_tokens: int
    capacity: int | None
    n_above: Tensor


class BufferSizer:
    """Predicts, from counts in earlier steps, the buffer size for a batch's values above a bound."""

    def __init__(self) -> None:
        self._above: deque[float] = deque(maxlen=MEMORY)
        # The batches in the step being queued, and the batches in steps whose counts the host has not read yet.
        self._of_step: list[_ObservedBatch] = []
        self._unread: deque[list[_ObservedBatch]] = deque()
        # With CUDA graphs: the predicted counts per token, and the last buffer size per token.
        self._expected: deque[float] = deque(maxlen=SHRINKS_AFTER)
        self._per_token: int | None = None
        self._ahead: _Ahead | None = None
        self._pass: _Pass | None = None
        # Whether the last batch overflowed its buffer, 0-dim bool; None before the first batch.
        self.overflowed: Tensor | None = None

    def above(self, pre_acts: PreActs, bound: Tensor | float) -> Chosen | None:
        """Select the values above a bound (a number or [d_sae]), every NaN, and possibly some values below the bound.

        All selected values are NaN if the buffer is too small. Return None if a dense matmul is faster or the size
        cannot be predicted yet.
        """
        # Launch the matmul first, so that the GPU is computing while the host waits for a count.
        matrix = pre_acts.matrix
        n_tokens, d_sae = matrix.shape
        size = self._ahead.capacity if self._ahead else self._capacity(n_tokens, d_sae)
        if size is None:
            chosen, n_above = None, (matrix >= bound).sum()
            self.overflowed = torch.zeros_like(n_above, dtype=torch.bool)
        else:
            chosen, n_above = largest_above(pre_acts, bound, size)
            self.overflowed = n_above == size
        if self._ahead:
            self._pass = _Pass(n_tokens, size, n_above)
        else:
            self._of_step.append(_ObservedBatch(n_tokens, size, HostCopy(n_above)))
        return chosen

    def decide(self, n_tokens: int, d_sae: int) -> int | None:
        """Decide the buffer size for the next batch and return it; None for the dense matmul.

        Do not process any other batch before calling `queued`. The last step's count is not read.
        """
        self._ahead = _Ahead(self._capacity(n_tokens, d_sae, n_unread=1))
        return self._ahead.capacity

    def queued(self) -> None:
        """Record that a step was queued on the GPU.

        If the buffer size was decided in advance, queue a copy of the pass's count to the host. The next replay
        overwrites the count on the GPU, so the copy is queued before that replay.
        """
        if self._ahead and self._pass:
            self._of_step.append(_ObservedBatch(self._pass.n_tokens, self._pass.capacity, HostCopy(self._pass.n_above)))
        if self._of_step:
            self._unread.append(self._of_step)
        self._of_step, self._ahead = [], None

    def _capacity(self, n_tokens: int, d_sae: int, n_unread: int = 0) -> int | None:
        """Predict the buffer size for a batch from all but the last `n_unread` steps; None for the dense matmul.

        Deterministic mode always uses dense matmuls. Checkpoints do not store counts from earlier steps, and sparse
        matmuls round differently, so a resumed run would otherwise not be bit-identical.
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
        per_token = latent_capacity.per_token(expected, d_sae)
        if per_token and n_unread:
            # Each change in the buffer size requires new graph captures.
            self._expected.append(expected)
            self._per_token = per_token = latent_capacity.per_token(max(self._expected), d_sae, self._per_token)
        return per_token * n_tokens if per_token else None

    def _learn(self, step: list[_ObservedBatch]) -> None:
        """Process the counts from a step's batches; if any batch overflowed, forget all earlier steps."""
        numbers = [int(batch.n_above.read()) for batch in step]
        if any(n_above == batch.capacity for n_above, batch in zip(numbers, step, strict=True)):
            self._above.clear()
        elif per_token := [n / batch.n_tokens for n, batch in zip(numbers, step, strict=True) if batch.n_tokens]:
            self._above.append(max(per_token))


def largest_above(pre_acts: PreActs, bound: Tensor | float, n: int) -> tuple[Chosen, Tensor]:
    """Select the n values that are farthest above a bound (or closest below it), and every NaN.

    Also return how many of the selected values are at or above the bound, 0-dim int64. If all n are, other values above
    the bound may be missing, so all selected values are set to NaN.
    """
    matrix = pre_acts.matrix
    if isinstance(bound, Tensor):
        # Rounding a distance to the matrix's dtype preserves its sign: a value above the bound never has a negative
        # distance.
        distances = PreActs(torch.sub(matrix, bound, out=torch.empty_like(matrix)))
        flat, excess = distances.largest_of_all(n)
        values = matrix.flatten().index_select(0, flat)
    else:
        flat, values = pre_acts.largest_of_all(n)
        excess = values - bound
    # The comparison is False for NaN, which must be kept and must not be treated as an overflow.
    n_above = (excess >= 0).sum()
    return (places_of(flat, *pre_acts.shape), values.where(n_above < n, torch.nan)), n_above

"""Ranks as threads that record the order and kind of their exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.activations.batches import Batch
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.group import local_shard
from trainer.parallel.threads import Meeting, Threads, on_all
from trainer.training.learner import Learner
from trainer.training.step import take_step

CPU = torch.device("cpu")
# The seconds after which a rank gives up if its peers make a different exchange or no exchange.
TIMEOUT_S = 20.0


class Call(NamedTuple):
    """An exchange within a group, with the shapes and types of the tensors."""

    group: str
    kind: str
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Recorded(Threads):
    """A group of threads that appends its exchanges to `calls`."""

    def __init__(self, name: str, calls: list[Call], meeting: Meeting, size: int, index: int) -> None:
        super().__init__(meeting, size, index)
        self._name, self._calls = name, calls

    def start_sums(self, tensors: Iterable[Tensor]) -> list[Any]:
        return super().start_sums(self._all_noted("sum", tensors))

    def sum_parts_(self, tensors: Iterable[Tensor]) -> None:
        # Do not call this class's `start_sums`, which would also record the sums.
        Threads.start_sums(self, self._all_noted("sum parts", tensors))

    def spread_parts_(self, tensors: Iterable[Tensor]) -> None:
        super().spread_parts_(self._all_noted("spread parts", tensors))

    def gather(self, tensor: Tensor) -> Tensor:
        return super().gather(*self._all_noted("gather", [tensor]))

    def to_owners(self, tensor: Tensor) -> Tensor:
        return super().to_owners(*self._all_noted("to owners", [tensor]))

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        # Record the total number of rows, because each rank has a different number.
        self._note("from owners", [tensor.new_empty(n_rows, *tensor.shape[2:])])
        return super().from_owners(tensor, n_rows)

    def copy_from_first_(self, tensors: Iterable[Tensor]) -> None:
        super().copy_from_first_(self._all_noted("copy", tensors))

    def _all_noted(self, kind: str, tensors: Iterable[Tensor]) -> list[Tensor]:
        listed = list(tensors)
        self._note(kind, listed)
        return listed

    def _note(self, kind: str, tensors: list[Tensor]) -> None:
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        self._calls.append(Call(self._name, kind, shapes))


class Trained(NamedTuple):
    """A rank's learner and recorded exchanges after its steps."""

    learner: Learner
    calls: list[Call]


def trained(job: JobConfig, x: Tensor, n_ranks: int, sharing: int, n_steps: int) -> list[Trained]:
    """Take `n_steps` steps on the raw batch x [n_tokens, d_in]. Groups of `sharing` ranks split the latents."""

    def work(learner: Learner, parallel: Parallel) -> None:
        own = local_shard(x, parallel.data)
        for step in range(n_steps):
            take_step([learner], parallel, step, [Batch([(own, own)], len(x))])

    return on_grid(job, x, n_ranks, sharing, work)


def on_grid(
    job: JobConfig, x: Tensor, n_ranks: int, sharing: int, work: Callable[[Learner, Parallel], object]
) -> list[Trained]:
    """Call `work` on each rank with a learner initialised from x. Groups of `sharing` ranks split the latents."""
    calls: list[list[Call]] = [[] for _ in range(n_ranks)]
    world = Meeting(n_ranks, TIMEOUT_S)
    rows = [Meeting(sharing, TIMEOUT_S) for _ in range(n_ranks // sharing)]
    columns = [Meeting(n_ranks // sharing, TIMEOUT_S) for _ in range(sharing)]

    def run(thread: Threads) -> Trained:
        torch.set_num_threads(1)
        rank, noted = thread.index, calls[thread.index]
        row, column = divmod(rank, sharing)
        everybody = Recorded("world", noted, world, n_ranks, rank)
        groups: dict[str, Any] = {"world": everybody}
        for name, meeting, size, index in (
            ("latents", rows[row], sharing, column),
            ("data", columns[column], n_ranks // sharing, row),
        ):
            members = f"{name} of {row if name == 'latents' else column}"
            if size > 1:
                groups[name] = everybody if size == n_ranks else Recorded(members, noted, meeting, size, index)
        parallel = Parallel(CPU, **groups)
        learner = Learner(job, x.shape[1], None, parallel)
        learner.initialise(x, x)
        noted.clear()
        work(learner, parallel)
        return Trained(learner, noted)

    return on_all(n_ranks, run, TIMEOUT_S)


def in_step(one: list[Call], other: list[Call]) -> bool:
    """Return whether two ranks make the same exchanges in the same order in the groups that both belong to."""
    shared = {call.group for call in one} & {call.group for call in other}
    first, second = ([call for call in calls if call.group in shared] for calls in (one, other))
    return first == second


def grids(sizes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs (number of ranks, number of ranks that split the latents) for ddp, tensor and every hybrid mode."""
    for size in sizes:
        for sharing in (1, 2, 4, 8):
            if sharing <= size:
                yield size, sharing

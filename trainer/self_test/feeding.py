"""Checks batches copied to the device while it is busy, and sums that the host reads later."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import Empty, IndexedSource, Indices, Pair, empty_rows
from trainer.activations.batches import Batches
from trainer.activations.micro_batches import Cut
from trainer.activations.training_data import IndexedData
from trainer.parallel.group import Group
from trainer.parallel.totals import Totals
from trainer.runtime.device_queue import stopwatch
from trainer.self_test.base import CPU, TINY, Check, job_of, learner_of, rows, take
from trainer.self_test.learning import waits_of

N_BATCHES, BATCH = 40, 2048


class Stored(IndexedSource):
    """A source of in-memory rows, read into a given buffer in the same way as rows from shards."""

    place = "the self-test"

    def __init__(self, x: Tensor) -> None:
        self._x, self.d_in, self.n_tokens, self.sizes, self.meta = x, x.shape[1], len(x), (len(x),), {}

    def rows(self, indices: Indices) -> Tensor:
        return self.pairs(indices)[0]

    def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        into = empty(len(indices), self.d_in, self._x.dtype)
        read = torch.index_select(self._x, 0, torch.from_numpy(np.sort(indices)), out=into)
        return read, read

    def name_of(self, index: int) -> str:
        return f"row {index}"


def check_feeding(device: torch.device) -> Iterator[Check]:
    """Compare batches on a busy device with batches on the CPU; check that late metric reads are exact."""
    source = Stored(rows(8 * BATCH, 256).half())
    differing = [
        number
        for number, (one, other) in enumerate(zip(_batches(source, device), _batches(source, CPU), strict=True))
        if not torch.equal(one.cpu().float(), other)
    ]
    yield Check("feeding", "batches", not differing, {"differing": differing})
    yield _read_later(device)


def _batches(source: Stored, device: torch.device) -> list[Tensor]:
    """Return copies of the batches, each queued behind other device work on the same batch."""
    batches = Batches(IndexedData(source, 0, 0, Group()), Cut(BATCH), start=0, device=device)
    try:
        return [_used(batches.next().hooks[0][0]) for _ in range(N_BATCHES)]
    finally:
        batches.close()


def _used(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.clone()
    # Keep the GPU busy for a few milliseconds, so that the next batches are copied before this work completes.
    product = x.float().T @ x.float()
    for _ in range(20):
        product = torch.nn.functional.normalize(product @ product)
    return x + 0 * product[0].nan_to_num().to(x.dtype)


def _read_later(device: torch.device) -> Check:
    """End a log interval without waiting, run the next step, and then check the interval's values."""
    x, watch, ended = rows(TINY.batch_size, TINY.d_in).to(device), stopwatch(device), list[tuple[Totals, Tensor]]()
    learner = learner_of(job_of(TINY, {}, {"precision": "fp32"}), TINY.d_in, device)
    learner.initialise(x, x)
    take(learner, 0, x)

    def end() -> None:
        watch.stop()
        parts = learner.sums() | {"state": learner.take_state()}
        ended.append((Totals(parts, Group()), torch.cat([part.double() for part in parts.values()])))

    indices = waits_of(device, end)
    take(learner, 1, x)
    ((totals, expected),) = ended
    is_same, took_s = torch.equal(torch.cat([*totals.read().values()]), expected.cpu()), watch.seconds()
    found = {"is_same": is_same, "seconds": took_s, "waits": dict(indices)}
    return Check("feeding", "a log interval", is_same and took_s > 0 and not indices, found)

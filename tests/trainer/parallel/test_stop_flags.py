"""Tests how ranks agree to stop or save. The GPUs are simulated, and run queued work only on demand."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.parallel.base import CudaRequests, Parallel, StepSums
from trainer.parallel.threads import Threads, on_all

CPU = torch.device("cpu")
zeros = torch.zeros


class Gpu(threading.local):
    """A simulated GPU for each thread; it stores queued work and counts how often the host had to wait."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], object]] = deque()
        self.waits = 0

    def catch_up(self) -> None:
        """Run all queued work."""
        while self.queue:
            self.queue.popleft()()


class Event:
    """An event in a GPU's queue. An event that was never recorded counts as complete."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._n_ahead = gpu, 0

    def record(self) -> None:
        self._n_ahead += 1
        self._gpu.queue.append(self._pass)

    def synchronize(self) -> None:
        self._gpu.waits += self._n_ahead > 0
        while self._n_ahead:
            self._gpu.queue.popleft()()

    def _pass(self) -> None:
        self._n_ahead -= 1


class Pinned:
    """Host memory that a GPU writes only when it reaches the copy in its queue."""

    def __init__(self, gpu: Gpu, n: int) -> None:
        self._gpu, self._values = gpu, zeros(n)

    def copy_(self, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking
        self._gpu.queue.append(lambda: self._values.copy_(source))

    def bool(self) -> Tensor:
        return self._values.bool()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    one = Gpu()

    def anywhere(n: int, *, pin_memory: bool = False, **others: Any) -> Any:
        return Pinned(one, n) if pin_memory else zeros(n, **others)

    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(one))
    monkeypatch.setattr(torch, "zeros", anywhere)
    return one


NOTHING, STOP, SAVE = (False, False), (True, False), (False, True)


@pytest.mark.parametrize("rank", range(3))
def test_a_request_on_any_rank_reaches_all_ranks_one_step_later_without_a_wait(rank: int, gpu: Gpu) -> None:
    requests = [NOTHING, SAVE, NOTHING, NOTHING, STOP, NOTHING, NOTHING]

    def run(thread: Threads) -> tuple[list[tuple[bool, ...]], int]:
        parallel, agreed = Parallel(CPU, world=thread, data=thread), []
        parallel.__dict__["_requests"] = CudaRequests()
        for own in requests:
            # By the time the host queues this step, the GPU has finished all earlier work.
            gpu.catch_up()
            agreed.append(parallel.sum_step_([StepSums([], [], [])], own if thread.index == rank else NOTHING))
        return agreed, gpu.waits

    assert on_all(3, run, 20.0) == [([NOTHING, *requests[:-1]], 0)] * 3


def test_if_a_gpu_lags_behind_the_same_decisions_are_made_at_the_same_steps(gpu: Gpu) -> None:
    totals = [(0.0, 0.0), (0.0, 2.0), (1.0, 0.0), (0.0, 0.0)]
    prompt, late = CudaRequests(), CudaRequests()
    answers = []
    for total in totals:
        gpu.catch_up()
        answers.append(prompt.read(torch.tensor(total)))
    assert not gpu.waits
    assert [late.read(torch.tensor(total)) for total in totals] == answers == [NOTHING, NOTHING, SAVE, STOP]
    # The host waited for the GPU three times, but never for the step it had just queued.
    assert gpu.waits == 3
    assert len(gpu.queue) == 2

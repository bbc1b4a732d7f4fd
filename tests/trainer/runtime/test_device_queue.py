from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from trainer.parallel.group import Group
from trainer.parallel.totals import Totals
from trainer.runtime.device_queue import HostCopy, moment, stopwatch

CPU = torch.device("cpu")


def test_a_stopwatch_measures_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watch = stopwatch(CPU)
    now[0] += 2
    watch.stop()
    now[0] += 100
    assert watch.seconds() == 2


def test_host_copies_keep_the_values_that_the_tensors_had_when_copied() -> None:
    sums, count = torch.tensor([1.0, 2.0]), torch.tensor([3])
    totals = Totals({"sums": sums, "count": count}, Group())
    sums.zero_()
    count.zero_()
    read = totals.read()
    assert {name: values.tolist() for name, values in read.items()} == {"sums": [1, 2], "count": [3]}
    assert {values.dtype for values in read.values()} == {torch.float64}
    assert Totals({}, Group()).read() == {}
    number = torch.ones(2)
    copy = HostCopy(number)
    number.zero_()
    assert copy.read().tolist() == [1, 1]


class OnSecondGpu(torch.Tensor):
    """A CPU tensor that pretends to be on the second GPU."""

    device = torch.device("cuda:1")


class Event:
    """A GPU event that records the name of its queue (CUDA stream).

    The default is the current queue, which belongs to the first GPU.
    """

    recorded: ClassVar[list[str]] = []

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing

    def record(self, stream: str | None = None) -> None:
        self.recorded.append(stream or queue_of())

    def synchronize(self) -> None:
        pass


def queue_of(device: torch.device | None = None) -> str:
    return f"queue of {device or 'cuda:0'}"


def test_copies_and_stopwatches_use_the_queue_of_the_gpu_that_holds_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", queue_of)
    monkeypatch.setattr(torch, "empty", lambda shape, *, dtype, pin_memory: empty(shape, dtype=dtype))
    Event.recorded.clear()
    number = torch.tensor([3.0, 4.0])
    copy = HostCopy(number.as_subclass(OnSecondGpu))
    assert copy.read().tolist() == [3, 4]
    stopwatch(OnSecondGpu.device).stop()
    assert Event.recorded == ["queue of cuda:1"] * 3


def test_work_on_two_gpus_is_ordered_in_their_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[str, Event]] = []

    class Queue(str):
        def wait_event(self, event: Event) -> None:
            held.append((self, event))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Queue(queue_of(device)))
    Event.recorded.clear()
    made = moment(OnSecondGpu.device)
    made.hold(torch.device("cuda:2"))
    assert Event.recorded == ["queue of cuda:1"]
    assert [queue for queue, _ in held] == ["queue of cuda:2"]
    # A CPU operation is complete when its call returns, so no GPU has to wait for it.
    moment(CPU).hold(torch.device("cuda:2"))
    assert len(held) == 1


@pytest.mark.parametrize(("size", "where"), [(1, CPU), (2, torch.device("meta"))])
def test_host_values_are_summed_on_the_device_that_ranks_use_for_exchanges(size: int, where: torch.device) -> None:
    summed: list[torch.device] = []

    class Noting(Group):
        def sum_(self, *tensors: torch.Tensor) -> None:
            summed.extend(tensor.device for tensor in tensors)

    group = Noting()
    group.size = size
    Totals({"seconds": torch.ones(3)}, group, torch.device("meta"))
    assert summed == [where]

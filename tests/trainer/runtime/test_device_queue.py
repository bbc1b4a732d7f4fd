from __future__ import annotations

import pytest
import torch

from trainer.parallel.group import Group
from trainer.parallel.totals import Totals
from trainer.runtime.device_queue import HostCopy, stopwatch

CPU = torch.device("cpu")


def test_a_stopwatch_measures_until_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watch = stopwatch(CPU)
    now[0] += 2
    watch.stop()
    now[0] += 100
    assert watch.seconds() == 2


def test_what_the_host_reads_later_is_what_was_there_when_it_asked() -> None:
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


@pytest.mark.parametrize(("size", "where"), [(1, CPU), (2, torch.device("meta"))])
def test_figures_of_the_host_are_added_over_ranks_where_these_exchange(size: int, where: torch.device) -> None:
    summed: list[torch.device] = []

    class Noting(Group):
        def sum_(self, *tensors: torch.Tensor) -> None:
            summed.extend(tensor.device for tensor in tensors)

    group = Noting()
    group.size = size
    Totals({"seconds": torch.ones(3)}, group, torch.device("meta"))
    assert summed == [where]

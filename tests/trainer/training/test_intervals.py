from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.contract.runs.checkpoint_manifest import Position
from trainer.parallel.group import Group
from trainer.parallel.shares import even
from trainer.parallel.threads import Threads, on_all
from trainer.parallel.totals import Totals
from trainer.training.intervals import EndedInterval, PendingIntervals

ways_to_read = pytest.mark.parametrize(("n_ranks", "late"), [(1, False), (1, True), (2, False), (2, True)])


class Rank:
    """A rank that ends a log interval after every step. `calls` lists the rank's exchanges, and `records` its sums."""

    def __init__(self, group: Threads, late: bool) -> None:
        self._group = group
        self.calls: list[str] = []
        self.records: list[tuple[int, float, float]] = []
        self.fails_at = ""
        self.pending = PendingIntervals(self._sum_paces, self._record, reads_late=late, is_alone=group.size == 1)

    def take(self, n_steps: int) -> None:
        for number in range(1, n_steps + 1):
            self.calls.append(f"step {number}")
            self.pending.follow()
            loss = Totals({"loss": torch.tensor([number * (self._group.index + 1.0)])}, self._group)
            at, shares = [Position(step, 10 * step) for step in (number - 1, number)], even(self._group.size, 1)
            self.pending.add(EndedInterval(*at, None, shares, totals=loss, states=Totals({}, Group())))

    def _sum_paces(self, ended: EndedInterval) -> Totals:
        self._call(f"sum {ended.at.step}")
        return Totals({"step_ms": torch.tensor([100.0 * ended.at.step])}, self._group)

    def _record(self, ended: EndedInterval, paces: dict[str, Tensor]) -> None:
        self._call(f"record {ended.at.step}")
        self.records.append((ended.at.step, float(ended.totals.read()["loss"]), float(paces["step_ms"])))

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails_at:
            raise OSError(name)


def on_ranks(n_ranks: int, late: bool, work: Callable[[Rank], None]) -> list[Rank]:
    def of_rank(group: Threads) -> Rank:
        rank = Rank(group, late)
        work(rank)
        return rank

    return on_all(n_ranks, of_rank, timeout_s=10)


@ways_to_read
@pytest.mark.parametrize("n_steps", [1, 2, 5])
def test_all_intervals_are_recorded_in_order_even_if_the_run_ends_immediately(
    n_ranks: int, late: bool, n_steps: int
) -> None:
    def work(rank: Rank) -> None:
        rank.take(n_steps)
        rank.pending.drain()

    for rank in on_ranks(n_ranks, late, work):
        whole = n_ranks * (n_ranks + 1) / 2
        expected = [(step, whole * step, n_ranks * 100.0 * step) for step in range(1, n_steps + 1)]
        assert rank.records == expected


@pytest.mark.parametrize(
    ("n_ranks", "late", "calls"),
    [
        (1, False, "step 1, sum 1, record 1, step 2, sum 2, record 2, step 3, sum 3, record 3"),
        (2, False, "step 1, sum 1, record 1, step 2, sum 2, record 2, step 3, sum 3, record 3"),
        (1, True, "step 1, step 2, sum 1, record 1, step 3, sum 2, record 2, sum 3, record 3"),
        (2, True, "step 1, step 2, sum 1, step 3, record 1, sum 2, record 2, sum 3, record 3"),
    ],
)
def test_all_ranks_exchange_in_the_same_order_even_one_or_two_steps_late(n_ranks: int, late: bool, calls: str) -> None:
    def work(rank: Rank) -> None:
        rank.take(3)
        rank.pending.drain()

    assert [", ".join(rank.calls) for rank in on_ranks(n_ranks, late, work)] == [calls] * n_ranks


@ways_to_read
@pytest.mark.parametrize("fails_at", ["sum 2", "record 2"])
def test_an_interval_is_not_recorded_again_if_recording_it_failed(n_ranks: int, late: bool, fails_at: str) -> None:
    def work(rank: Rank) -> None:
        rank.fails_at = fails_at
        with pytest.raises(OSError, match=fails_at):
            rank.take(5)
        rank.pending.drain()
        rank.pending.drain()

    for rank in on_ranks(n_ranks, late, work):
        assert rank.calls.count(fails_at) == 1
        steps = [step for step, _, _ in rank.records]
        assert (steps[0], 2 in steps, steps) == (1, False, sorted(steps))

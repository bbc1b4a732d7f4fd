"""Ends, sums over ranks and records the log intervals of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from trainer.contract.runs.checkpoint_manifest import Position
from trainer.metrics.pace import Span
from trainer.parallel.shares import Shares
from trainer.parallel.totals import Totals


class EndedInterval(NamedTuple):
    """A log interval whose last step is queued, with the ranks' shares and the sums and states of all learners."""

    since: Position
    at: Position
    span: Span
    shares: Shares
    totals: Totals
    states: Totals


class PendingIntervals:
    """The log intervals that have ended but are not recorded yet.

    On a GPU the next step is queued while the host reads results of the last one (`reads_late`). Host timings are
    available one step after the interval. Several ranks also sum them, and have the sums two steps after it. All ranks
    make the same calls at the same steps, since `sum_paces` and `record` exchange values.
    """

    def __init__(
        self,
        sum_paces: Callable[[EndedInterval], Totals],
        record: Callable[[EndedInterval, dict[str, Tensor]], None],
        *,
        reads_late: bool,
        is_alone: bool,
    ) -> None:
        self._sum_paces, self._record = sum_paces, record
        self.reads_late, self._is_alone = reads_late, is_alone
        # Each is cleared before it is used, so that an interval is never recorded twice, even after an error.
        self._ended: EndedInterval | None = None
        self._summed: tuple[EndedInterval, Totals] | None = None

    def add(self, ended: EndedInterval) -> None:
        """Add an interval; record it now, unless its results are read late."""
        self._ended = ended
        if not self.reads_late:
            self.drain()

    def follow(self) -> None:
        """Read the available results while the device runs a step that was queued later; call this after each step."""
        self._record_summed()
        if self._ended:
            ended, self._ended = self._ended, None
            self._summed = ended, self._sum_paces(ended)
        if self._is_alone:
            self._record_summed()

    def drain(self) -> None:
        """Record all intervals; wait for their results."""
        self.follow()
        self._record_summed()

    def _record_summed(self) -> None:
        """If the paces of an interval are being summed, wait for them and record the interval."""
        if self._summed:
            (ended, paces), self._summed = self._summed, None
            self._record(ended, paces.read())

"""Records a run's log intervals, with sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.activations.base import Source, StreamSource
from trainer.activations.outliers import LeftOut, Outliers
from trainer.contract.planning.workload import Layout
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.settings.job import JobConfig
from trainer.metrics.pace import STORED_REMEDY, STREAM_REMEDY, URL_REMEDY, DataWait, Pace, Span
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group
from trainer.parallel.shares import Shares
from trainer.parallel.totals import Totals
from trainer.reporting.report import Report
from trainer.training.bad_rows import BadRows
from trainer.training.learner import Learner, StepState
from trainer.training.sharded_state import under
from trainer.training.skipped_steps import Skips

_OUTLIERS = "outliers"
# The metric whose sums are the firings of each latent and the number of tokens.
_FIRINGS = "dense_fraction"


class Watching(Protocol):
    """Follows latents during training; all ranks make the same calls."""

    def count(self, label: str, sums: Tensor) -> None:
        """Add an interval's firings of each latent and its number of tokens, [d_sae + 1], for one SAE."""
        ...

    def take(self, *, must: bool) -> None:
        """Store a snapshot if it is due, or if it `must` be taken."""
        ...


class EndedInterval(NamedTuple):
    """A log interval whose last step is queued, with the ranks' shares of work, and the learners' sums and states."""

    since: Position
    at: Position
    span: Span
    shares: Shares
    totals: Totals
    states: Totals


class IntervalRecorder:
    """Measures one rank's log intervals, and records them with the values from all ranks."""

    def __init__(
        self,
        job: JobConfig,
        source: Source,
        parallel: Parallel,
        learners: Mapping[str, Learner],
        outliers: Sequence[Outliers],
        report: Report,
        bad_rows: BadRows,
        start: Position,
    ) -> None:
        self._job, self._source, self._parallel = job, source, parallel
        self._learners, self._outliers = learners, outliers
        self._report, self._bad_rows, self._skips = report, bad_rows, Skips(report)
        self._pace, self._data_wait = Pace(parallel), DataWait()
        self._first_step, self._since = start.step, start
        self.watcher: Watching | None = None

    @property
    def given_up(self) -> set[str]:
        """The labels of diverged SAEs."""
        return self._skips.given_up

    def begin_step(self, at: Position, waited_for_data_s: float) -> None:
        """If the step after `at` is the first in an interval, start the clocks."""
        if at == self._since:
            # Start the clocks here, so that the pace excludes set-up and saves.
            self._pace.begin(waited_for_data_s)

    def end(self, at: Position, own_tokens: int, waited_for_data_s: float) -> EndedInterval:
        """End the interval at `at`, and start summing its metrics; `own_tokens` is this rank's tokens per step."""
        n_steps = at.step - self._since.step
        span = self._pace.end(n_steps * own_tokens, n_steps, waited_for_data_s)
        parts = {
            f"{label}/{name}": sums
            for label, learner in self._learners.items()
            for name, sums in learner.sums().items()
        }
        parts[_OUTLIERS] = torch.cat([of_hook.counts for of_hook in self._outliers])
        states = {label: learner.take_state() for label, learner in self._learners.items()}
        since, self._since = self._since, at
        return EndedInterval(
            since,
            at,
            span,
            self._parallel.shares,
            totals=self._parallel.totals(parts, self._parallel.data),
            states=Totals(states, Group()),
        )

    def sum_paces(self, ended: EndedInterval) -> Totals:
        """Start summing an interval's speeds and waiting times over the ranks."""
        return self._parallel.totals(self._pace.sums(ended.span), self._parallel.world)

    def record(self, ended: EndedInterval, paces: dict[str, Tensor], total_steps: int) -> None:
        """Record an interval; `paces` contains all ranks' speeds and waiting times."""
        totals, states = ended.totals.read(), ended.states.read()
        left_out = dict(zip(self._job.row_names, map(LeftOut.of, totals[_OUTLIERS].view(-1, 4)), strict=True))
        for name, found in left_out.items():
            self._bad_rows.look_at(found, ended.since, ended.at, name)
        values: dict[str, dict[str, float]] = {}
        for label, learner in self._learners.items():
            state = StepState.of(states[label])
            self._skips.look_at(label, learner, state, ended.at)
            own = under(totals, f"{label}/")
            values[label] = learner.values(own, state)
            if self.watcher:
                self.watcher.count(label, own[_FIRINGS])
        self._report.learnt(self._parallel.all_gather(values))
        self.share_news()
        self._report.pace(ended.at.step, self._pace.values(paces), paces)
        self._report_left_out(ended.at.step, left_out)
        self._report.interval(ended.at.step, total_steps)
        # The first interval includes the warm-up, so its speed is not compared with the expected speed.
        if ended.since.step > self._first_step:
            self._report.compare(ended.at.step, float(paces["step_ms"].mean()))
            self._report_data_wait(paces)

    def share_news(self) -> None:
        """Exchange the ranks' events about their SAEs; raise `UserError` on all ranks if no SAE is still learning."""
        self._report.deliver(self._parallel.all_gather(self._report.take_events()))
        self._skips.given_up |= self._parallel.all_gather(dict.fromkeys(self._skips.given_up, True)).keys()
        self._skips.end_where_none_learns()

    def _report_left_out(self, step: int, left_out: Mapping[str, LeftOut]) -> None:
        """Report the fraction of rows left out at each hook."""
        members = Layout(self._job, self._parallel.world_size).members
        for number, name in enumerate(self._job.row_names):
            of_hook = [label for label, one in members.items() if self._job.hook_number(one) == number]
            labels = [label for label in of_hook if label in self._report.values] if name else [""]
            self._report.left_out(step, left_out[name], self._job.data.max_norm, name, labels)

    def _report_data_wait(self, paces: dict[str, Tensor]) -> None:
        """Report that all ranks are waiting for data, with a remedy, or that they are no longer waiting."""
        _, seconds, waited_s, ranks = paces["pace"].tolist()
        waits = self._data_wait.look(waited_s / max(seconds, 1e-9), seconds / ranks)
        if waits is not None:
            remedy = STREAM_REMEDY if isinstance(self._source, StreamSource) else STORED_REMEDY
            if caches := self._source.caches:
                remedy = f"{URL_REMEDY}; now {sum(cache.rate for cache in caches) / 1e6:,.0f} MB/s arrive"
            share = f"training waits for data {waited_s / seconds:.0%} of the time"
            self._report.warn("data_wait", f"{share}: {remedy}") if waits else self._report.log("data_wait", share)


class PendingIntervals:
    """The log intervals that have ended but have not been recorded yet.

    On a GPU, the host queues the next step before it reads the results of the last one (`reads_late`). A rank's timings
    are available one step after the interval. If there are several ranks, they sum their timings, and the sums are
    available two steps after the interval. All ranks make the same calls at the same steps, since `sum_paces` and
    `record` exchange values.
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
        # Each attribute is cleared before its value is used, so that an interval is never recorded twice, even after an
        # error.
        self._ended: EndedInterval | None = None
        self._summed: tuple[EndedInterval, Totals] | None = None

    def add(self, ended: EndedInterval) -> None:
        """Add an interval, and record it immediately unless results are read late."""
        self._ended = ended
        if not self.reads_late:
            self.drain()

    def follow(self) -> None:
        """Read the available results while the device runs a later step; call this after queuing each step."""
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
        """If an interval's paces are being summed, wait for the sums and record the interval."""
        if self._summed:
            (ended, paces), self._summed = self._summed, None
            self._record(ended, paces.read())

"""Reads jobs for screens and scripts: rows from the store, updated with live values from the run folders."""

from __future__ import annotations

import contextlib
import heapq
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.going import ENDS, Evaluations, Going
from sae_tui.jobs.gpus.availability import Holders, holders
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.machine import elsewhere, is_here, silence
from sae_tui.jobs.output import kind_of, time_limit_s
from sae_tui.jobs.view.shape import d_sae_words, k_words
from sae_tui.jobs.view.sweeps import labels
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.runs.lock import is_held
from trainer.contract.runs.log_tail import tail
from trainer.contract.settings.series import USAGE, held_out, held_out_metrics, measured_names, own_series
from trainer.contract.store.database import StoreError
from trainer.contract.store.follower import StoreFollower
from trainer.contract.store.job_store import ENDING, Control
from trainer.contract.store.metrics_store import Point, SeriesReader, SeriesWriter, is_before_first_step
from trainer.contract.store.rows import VALUE_COLUMNS, Event, Job, Rank
from trainer.contract.store.seeds import Seeds, Spread
from trainer.contract.store.states import JobState

MOST_POINTS = 2000
SILENT_EVERY_S = 10.0


class News(msgspec.Struct, frozen=True):
    """A job event recorded after the first poll."""

    job_id: int
    event: Event


class JobView(Job, frozen=True, kw_only=True):
    """A job's row with the latest values from its run.

    `progress` is between 0 and 1, and `eta_s` is None unless the job is running. `dropped` is the number of metric rows
    the run could not store, or None if the run's `metrics.db` was not read. `best_sae` is the SAE in a sweep that the
    loss and metrics belong to, or "" for a single SAE. `seeds` contains the SAEs that differ from it only in the seed,
    or is None; if it is not None, the values are means over these SAEs. `others` maps the names of metrics without a
    column to their latest values; for a program, it contains everything that the program reports, if this was read. `k`
    and `d_sae` are text; for a sweep, they contain the lowest and the highest value. `evaluation` is the SAEs' running
    evaluation. `silent` describes how long the job's host has been silent; if it is not empty, the job's state is
    unknown.
    """

    phase: str = ""
    dropped: int | None = None
    progress: float = 0.0
    eta_s: float | None = None
    stop_requested: bool = False
    best_sae: str = ""
    seeds: Seeds | None = None
    others: Mapping[str, float] = {}
    k: str = ""
    d_sae: str = ""
    evaluation: Going | None = None
    silent: str = ""


def is_loading(job: JobView) -> bool:
    """Return whether a running job has not taken a step yet, for example because it is still loading its model."""
    return job.state == JobState.RUNNING and is_before_first_step(job.phase)


def newest_value(job: Job, name: str) -> float | None:
    """Return the latest value of a job metric or loss, or None if it is unknown."""
    if name in VALUE_COLUMNS:
        value: float | None = getattr(job, name)
        return value
    return job.others.get(name) if isinstance(job, JobView) else None


def overfitting_words(job: Job) -> str:
    """Describe how a job is overfitting, or return "" if it is not."""
    return f"overfits: {job.overfitting}" if job.overfitting else ""


def judged_value(job: Job, name: str) -> tuple[float | None, bool]:
    """Return the value of a metric for judging a job, and whether the value was measured only on training batches.

    Return the held-out value if the metric has one. Before the run's first evaluation, there is no held-out value.
    """
    if name not in held_out_metrics():
        return newest_value(job, name), False
    measured = newest_value(job, held_out(name))
    return (newest_value(job, name), True) if measured is None else (measured, False)


def spread_of(job: JobView, name: str) -> Spread | None:
    """Return the spread over seeds of the value used to judge a job, or None if there are not several seeds."""
    if job.seeds is None:
        return None
    _, is_of_batch = judged_value(job, name)
    return job.seeds.spreads.get(name if is_of_batch or name not in held_out_metrics() else held_out(name))


def _without_column() -> list[str]:
    """Return the names of metrics whose latest values are stored only in a run's `metrics.db`."""
    return [name for name in measured_names() if name not in VALUE_COLUMNS]


def _others(job: Job, live: LiveRun) -> dict[str, float]:
    """Return the latest values of the metrics without a column or, for a program, of everything it reports."""
    if not kind_of(job.config).is_program:
        return live.values(_without_column())
    return {name: live.latest[name] for name in [*own_series(live.latest), *USAGE] if name in live.latest}


def _lacks_held_out(job: Job) -> bool:
    """Return whether a job's row may lack a held-out value from its run; older versions did not record it there."""
    return job.fvu is not None and job.heldout_fvu is None


class JobsReader:
    """Reads all jobs, newest first. If the store cannot be read, `poll` does not raise, and `problem` explains why."""

    def __init__(self, data: DataDir, *, reads_series: bool = False) -> None:
        """Prepare to read; if `reads_series`, also read what ended jobs reported, which takes about 1 ms per job."""
        self._reads_series = reads_series
        self.jobs: tuple[JobView, ...] = ()
        self.holders = Holders()
        # The evaluations that have ended since the first poll, oldest first.
        self.news: tuple[News, ...] = ()
        self._last_event: int | None = None
        self._data = data
        self._store = _ControlStore(data)
        self._rows: list[Job] = []
        self._passed_over = ""
        self._asked: set[int] = set()
        self._live: dict[int, LiveRun] = {}
        self._evaluations = Evaluations(data)
        self._still: dict[int, tuple[Job, JobView]] = {}
        self._silent = _SilentHosts(data)

    @property
    def problem(self) -> str:
        return self._store.problem

    @property
    def passed_over(self) -> str:
        """A message about jobs whose rows cannot be read, or "" if there are none."""
        return self._passed_over if not self.problem else ""

    def poll(self) -> bool:
        """Read new data and return whether anything has changed; if nothing has, this takes microseconds."""
        changed = self._store.poll(self._read)
        news = [self._evaluations.poll(), *(live.poll() for live in self._live.values()), self._silent.poll(self._rows)]
        if not changed and not any(news):
            return False
        going = self._evaluations.going
        self.jobs = tuple(self._silent.mark(_evaluated(self._view(job), going.get(job.id))) for job in self._rows)
        return True

    def close(self) -> None:
        self._store.close()
        for live in self._live.values():
            live.close()

    def _view(self, job: Job) -> JobView:
        """Return a job's view; reuse the last view if the job cannot have changed, which is the usual case."""
        live = self._live.get(job.id)
        if live or job.id in self._asked:
            self._still.pop(job.id, None)
            return _view(job, live, job.id in self._asked)
        if job.state is JobState.IMPORTED:
            # Do not reuse the last view: the report card can change even if the row does not.
            return self._imported_view(job)
        cached = self._still.get(job.id)
        if cached is None or cached[0] != job:
            cached = self._still[job.id] = (job, self._still_view(job))
        return cached[1]

    def _imported_view(self, job: Job) -> JobView:
        """Return the view of an imported SAE, with the metrics from its report card."""
        return _with_card(_view(job, None, False), self._data.sae(job.id))

    def _still_view(self, job: Job) -> JobView:
        """Return the view of a job that is not running, based on its row.

        Read the run's `metrics.db` once for values missing from the row: the best SAE in a sweep, metrics without a
        column, and held-out values for a job run by an older version.
        """
        is_by_run = bool(labels(job.config)) or _lacks_held_out(job)
        is_reported = self._reads_series and kind_of(job.config).is_program
        if not is_by_run and not _without_column() and not is_reported:
            return _view(job, None, False)
        live = LiveRun(self._data.run(job.id))
        live.poll()
        live.close()
        return msgspec.structs.replace(_view(job, live if is_by_run else None, False), others=_others(job, live))

    def _read(self, control: Control | None) -> None:
        self._rows = control.jobs() if control else []
        self._passed_over = control.problem if control else ""
        active = [job for job in self._rows if not job.state.is_final]
        if control:
            self._asked = {job.id for job in active if control.open_requests(job.id) & ENDING}
            ranks = [rank for job in active for rank in control.ranks(job.id)]
            self.holders = holders(self._rows, control.leases(), ranks)
            self._read_news(control)
        self._follow(active)

    def _read_news(self, control: Control) -> None:
        last = control.last_event()
        if self._last_event is not None:
            news = control.news(ENDS, self._last_event)
            self.news += tuple(News(job_id, event) for job_id, event in news)
        self._last_event = last

    def _follow(self, active: Sequence[Job]) -> None:
        """Keep the `metrics.db` files for running jobs open, and close the files for all other jobs."""
        wanted = {job.id for job in active if job.state != JobState.QUEUED}
        for job_id in self._live.keys() - wanted:
            self._live.pop(job_id).close()
        for job_id in wanted - self._live.keys():
            self._live[job_id] = LiveRun(self._data.run(job_id))


def _with_card(view: JobView, sae: Path) -> JobView:
    """Return the view with the metrics from the report card of the SAE with the lowest FVU, if there is one."""
    # Only imported SAEs have no metrics of their own, and reading report cards takes a tenth of a command's time.
    from sae_tui.jobs.evaluation.report_card import read_cards

    if not (cards := read_cards(sae)):
        return view
    card = min(cards, key=lambda card: card.figures.fvu)
    own = card.figures
    return msgspec.structs.replace(view, heldout_fvu=own.fvu, heldout_l0=own.l0, tokens=card.tokens or view.tokens)


def _evaluated(view: JobView, evaluation: Going | None) -> JobView:
    return view if evaluation is None else msgspec.structs.replace(view, evaluation=evaluation)


class _SilentHosts:
    """Finds jobs on other hosts that have been silent for a long time."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self._words: dict[int, str] = {}
        self._again_at = 0.0

    def poll(self, jobs: Iterable[Job]) -> bool:
        """Check every 10 s and return whether anything has changed; if no job is on another host, read no files."""
        if time.monotonic() < self._again_at:
            return False
        self._again_at = time.monotonic() + SILENT_EVERY_S
        away = [job for job in jobs if not (job.state.is_final or is_here(job))]
        words = {job.id: elsewhere(self._data, job) for job in away if silence(self._data, job).is_long}
        changed, self._words = words != self._words, words
        return changed

    def mark(self, view: JobView) -> JobView:
        words = self._words.get(view.id, "")
        return msgspec.structs.replace(view, silent=words, eta_s=None) if words and not view.state.is_final else view


class JobReader:
    """Reads a job with its curves, events and logs; `view` is None until the job is read, and after it is deleted."""

    def __init__(self, data: DataDir, job_id: int, *, mends: bool = False) -> None:
        """Prepare to read a job in a data folder; if `mends`, rebuild missing metric roll-ups once."""
        self.job_id = job_id
        self._data, self._mends = data, mends
        self.view: JobView | None = None
        self.ranks: tuple[Rank, ...] = ()
        self.series: dict[tuple[str, int], list[Point]] = {}
        self.events: tuple[Event, ...] = ()
        self._paths, self._sae = data.run(job_id), data.sae(job_id)
        self._store = _ControlStore(data)
        self._live = LiveRun(self._paths)
        self._row: Job | None = None
        self._asked = False
        self._restarts: tuple[int, int] | None = None
        self._reported: list[Event] = []
        self._silent = _SilentHosts(data)
        self._evaluations = Evaluations(data)

    @property
    def problem(self) -> str:
        return self._store.problem

    @property
    def phase(self) -> str:
        return self.view.phase if self.view else ""

    def poll(self) -> bool:
        """Read new data and return whether anything has changed; never raise."""
        changed = self._store.poll(self._read)
        # Build a list so that every source is polled.
        news = any([self._live.poll(), self._evaluations.poll(), self._silent.poll([self._row] if self._row else [])])
        if self._row is None or not (changed or news):
            return False
        going = self._evaluations.going.get(self.job_id)
        self.view = self._silent.mark(_evaluated(self._row_view(self._row), going))
        run_events: list[Event] = []
        if self._live.reader:
            try:
                if self._mends:
                    self._mends = False
                    _roll_up_missing(self._data, self.job_id, self._live.reader)
                self._extend_series(self._live.reader)
                run_events = self._live.reader.events()
            except StoreError:
                self._live.close()
        self.events = _merge_events(self._reported, run_events)
        return True

    def _row_view(self, job: Job) -> JobView:
        view = _view(job, self._live, self._asked)
        return _with_card(view, self._sae) if job.state is JobState.IMPORTED else view

    def log_tail(self, rank: int, n_lines: int) -> list[str]:
        """Return the last lines of a rank's log; read only the end of the file."""
        return tail(self._paths.log(rank), n_lines)

    def close(self) -> None:
        self._store.close()
        self._live.close()

    def _read(self, control: Control | None) -> None:
        if control is None:
            return
        if control.state(self.job_id) is None:
            if self._paths.root.exists():
                # The store was lost, but a repair will list the job again.
                return
            self._row = self.view = None
        self._row = control.job(self.job_id)
        self.ranks = tuple(control.ranks(self.job_id))
        self._asked = bool(control.open_requests(self.job_id) & ENDING)
        self._reported = control.events(self.job_id)

    def _extend_series(self, reader: SeriesReader) -> None:
        """Read the points after the last known point; if a series becomes too long, reread it at a lower resolution.

        Read all points again if the run has gone back to an earlier step.
        """
        if (restarts := reader.restarts()) != self._restarts:
            self.series.clear()
            self._restarts = restarts
        for name, rank in reader.series():
            points = self.series.setdefault((name, rank), [])
            if points:
                points += reader.points(name, rank, after=points[-1].step)
            if not points or len(points) > MOST_POINTS:
                points[:] = reader.history(name, rank, most=MOST_POINTS // 2)


def _roll_up_missing(data: DataDir, job_id: int, reader: SeriesReader) -> None:
    """Rebuild missing roll-ups in a run's store, unless the run is alive or the store cannot be written to."""
    paths = data.run(job_id)
    if reader.is_rolled_up() or is_held(paths.lock_file):
        return
    with contextlib.suppress(UserError):
        data.refuse_links(job_id)
        with contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
            writer.roll_up_missing()


def _merge_events(store_events: Sequence[Event], run_events: Sequence[Event]) -> tuple[Event, ...]:
    """Merge the events from the store and from the run by time; omit the store's copies of the run's events."""
    repeated = {(event.kind, event.message) for event in run_events}
    rest = [event for event in store_events if (event.kind, event.message) not in repeated]
    # Events in each list keep their order even if the clock was set back.
    return tuple(heapq.merge(rest, run_events, key=lambda event: event.timestamp))


class _ControlStore:
    """Reads the control store; `problem` explains why the store cannot be read, or is ""."""

    def __init__(self, data: DataDir) -> None:
        self.problem = _lost_list_problem(data)
        self._follower = StoreFollower(data.control_db, lambda path: Control(path, readonly=True))

    def poll(self, read: Callable[[Control | None], None]) -> bool:
        """Call `read` if the store has changed, with None if it was deleted; return whether `read` was called."""
        try:
            changed = self._follower.poll(read)
        except UserError as error:
            self.problem = str(error)
            return False
        if changed:
            self.problem = ""
        return changed

    def close(self) -> None:
        self._follower.close()


def _lost_list_problem(data: DataDir) -> str:
    """Return a message if there are run folders but no control store, or "" otherwise."""
    if os.path.exists(data.control_db) or not data.last_id():
        return ""
    return f"the job list is missing, but {data.root} has runs; `sae-tui repair` rebuilds the list"


def _left_s(job: Job) -> float | None:
    """Return the seconds until the last step or, if a program does not report its steps, until its time limit."""
    limit_s = time_limit_s(job.config) if kind_of(job.config).is_program and not job.total_steps else None
    if limit_s is None or job.started is None:
        return job.left_s
    return max(0.0, job.started + limit_s - time.time())


def _view(job: Job, live: LiveRun | None, asked: bool) -> JobView:
    """Return a view of a job row with newer values from its run."""
    job = msgspec.structs.replace(job, **live.fields()) if live else job
    heartbeat = live.heartbeat if live else None
    return JobView(
        **msgspec.structs.asdict(job),
        # A queued job has no phase; the heartbeat is from its last attempt.
        phase=heartbeat.phase if heartbeat and job.state != JobState.QUEUED else "",
        dropped=heartbeat.dropped if heartbeat else None,
        progress=min(1.0, job.step / job.total_steps) if job.total_steps else 0.0,
        eta_s=_left_s(job) if job.state == JobState.RUNNING else None,
        stop_requested=asked,
        best_sae=live.best_sae if live else "",
        seeds=live.seeds if live else None,
        others=_others(job, live) if live else {},
        k=k_words(job.config),
        d_sae=d_sae_words(job.config, job.d_in),
    )

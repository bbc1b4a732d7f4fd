"""Reads the job store on a separate thread and reports changes to the screen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from sae_tui.jobs.gpus.availability import Holders
from sae_tui.jobs.gpus.idle import with_idle
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.revive import revive
from sae_tui.jobs.view.past_runs import Forecaster, QualityForecast, Series
from sae_tui.jobs.view.postmortem import Postmortem, examine
from sae_tui.jobs.view.program_use import ProgramUse
from sae_tui.jobs.view.reader import JobReader, JobsReader, JobView, News
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.planning.plan import Plan, read_plan
from trainer.contract.runs.checkpoint_mirror import Mirrored, read_mirrored
from trainer.contract.store.holder import describe_holder, holder_of, is_halted
from trainer.contract.store.metrics_store import Point
from trainer.contract.store.rows import Event, Rank

POLL_S = 0.5
RECONCILE_S = 5.0
IDLE_EVERY_S = 60.0
SILENT_AFTER_S = 10.0


class JobDetail(msgspec.Struct, frozen=True):
    """An immutable snapshot of everything shown on a job's screen."""

    view: JobView
    phase: str
    series: Mapping[tuple[str, int], tuple[Point, ...]]
    events: tuple[Event, ...]
    log: tuple[str, ...]
    log_rank: int
    postmortem: Postmortem | None = None
    plan: Plan | None = None  # The values chosen by the ranks for "auto" settings.
    energy: str = ""  # A description of the energy used by the job's GPUs.
    member: str = ""  # The label of the displayed SAE in a sweep, or "" for a single SAE.
    ranks: tuple[Rank, ...] = ()  # The processes of all attempts.
    use: ProgramUse | None = None  # A command's use of this machine, or None until it is read.
    forecasts: Mapping[str, QualityForecast] = {}  # The forecasts for the SAEs, by label.
    mirrored: Mirrored | None = None  # The state of the mirror of its checkpoints.


class Watcher:
    """Polls the job store twice per second.

    Results such as `jobs` and `news` are replaced rather than modified, so any thread may read them.
    """

    def __init__(self, data: DataDir, on_change: Callable[[], object], *, readonly: bool = False) -> None:
        """Watch the jobs in a data folder.

        Unless `readonly`, also restart a missing queue process, and rebuild missing metric roll-ups.
        """
        self.jobs: tuple[JobView, ...] = ()
        self.detail: JobDetail | None = None
        self.holders = Holders()
        self.news: tuple[News, ...] = ()
        self._problem = ""
        self._answered = time.monotonic()
        self._data, self._mends = data, not readonly
        self._revive = None if readonly else revive
        self._on_change = on_change
        self._followed: tuple[int, int] | None = None
        self._wake = threading.Event()
        self._stopped = False
        self._reconcile_at = self._idle_at = 0.0
        self._idle: Mapping[str, str] = {}
        self._unmended = ""
        self._detail_reader: JobReader | None = None
        self._forecaster = Forecaster(data)
        self._n_read = 0  # how many of the reader's news are in `news`
        self._reported: set[int] = set()  # the jobs whose forecast has failed, or that forecasts leave out
        self._thread = threading.Thread(target=self._run, name="job-watcher", daemon=True)

    @property
    def problem(self) -> str:
        """Why jobs cannot be read or changed, for example because a disk does not respond, or "" if they can."""
        silent_s = time.monotonic() - self._answered
        if self._thread.is_alive() and silent_s > SILENT_AFTER_S:
            return f"the jobs have not been read for {silent_s:.0f} s: the disk of {self._data.root} does not respond"
        return self._problem

    def start(self) -> None:
        self._answered = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to stop, without waiting for it."""
        self._stopped = True
        self._wake.set()

    def follow(self, job_id: int | None, rank: int = 0) -> None:
        """Keep `detail` up to date for a job, with this rank's log; if `job_id` is None, follow no job."""
        self._followed = None if job_id is None else (job_id, rank)
        self._wake.set()

    def poke(self) -> None:
        """Poll immediately, for example after an action on a job."""
        self._wake.set()

    def _run(self) -> None:
        jobs = JobsReader(self._data)
        while not self._stopped:
            self._wake.clear()
            try:
                changed = self._look(jobs)
            except Exception as error:
                # This thread must survive every store or disk error.
                changed, self._problem = True, f"the jobs cannot be read: {error!r}"
            self._answered = time.monotonic()
            if changed and not self._stopped:
                self._on_change()
            self._wake.wait(POLL_S)

    def _look(self, jobs: JobsReader) -> bool:
        """Read new data, and return whether anything has changed."""
        if time.monotonic() >= self._reconcile_at:
            self._unmended = self._reconcile()
            self._reconcile_at = time.monotonic() + RECONCILE_S
        changed = jobs.poll()
        problem = jobs.problem or jobs.passed_over or self._unmended
        changed = changed or problem != self._problem
        self.jobs, self._problem = jobs.jobs, problem
        self.news, self._n_read = (*self.news, *jobs.news[self._n_read :]), len(jobs.news)
        self.holders = self._with_idle(jobs.holders)
        self._detail_reader = self._reader(self._detail_reader)
        return self._read_detail(self._detail_reader, jobs.jobs) or changed

    def _reader(self, reader: JobReader | None) -> JobReader | None:
        """Return the reader for the followed job; reuse `reader` if it reads that job."""
        followed = self._followed
        if reader is not None and (followed is None or reader.job_id != followed[0]):
            reader.close()
            reader = self.detail = None
        if reader is None and followed is not None:
            reader = JobReader(self._data, followed[0], mends=self._mends)
        return reader

    def _read_detail(self, reader: JobReader | None, jobs: Sequence[JobView]) -> bool:
        followed = self._followed
        if reader is None or followed is None:
            return False
        changed = reader.poll()
        log = tuple(reader.log_tail(followed[1], 500))
        if reader.view is None:
            return changed
        old = self.detail
        if not changed and old is not None and old.log == log and old.log_rank == followed[1]:
            return False
        series = {key: tuple(points) for key, points in reader.series.items()}
        postmortem = self.detail.postmortem if self.detail and not changed else examine(self._data, reader.view)
        view = reader.view
        plan = read_plan(self._data.run(view.id).attempt(view.attempt) / "plan.json")
        self.detail = JobDetail(
            view, reader.phase, series, tuple(reader.events), log, followed[1], postmortem, plan, ranks=reader.ranks,
            forecasts=self._forecasts(view, series, jobs), mirrored=read_mirrored(self._data.run(view.id).root),
        )  # fmt: skip
        return True

    def _forecasts(self, view: JobView, series: Series, jobs: Sequence[JobView]) -> Mapping[str, QualityForecast]:
        """Return the forecasts for a job; report every failure only once per job, since it repeats at each tick."""
        try:
            found = self._forecaster.forecasts(view, series, jobs)
        except Exception as error:
            # A forecast reads the settings of many jobs. None of them may hide this job's screen.
            self._warn(view.id, f"has no forecast because of a bug in sae-tui: {error!r}")
            return {}
        for job_id, why in self._forecaster.unread.items():
            self._warn(job_id, f"is left out of forecasts: {why}")
        return found

    def _warn(self, job_id: int, message: str) -> None:
        """Add a warning to the news, unless there is one about this job."""
        if job_id not in self._reported:
            self._reported.add(job_id)
            event = Event(timestamp=time.time(), level="warning", kind="forecast", message=message)
            self.news += (News(job_id, event),)

    def _with_idle(self, held: Holders) -> Holders:
        """Add descriptions of GPUs that are held but idle, updated once per minute."""
        if time.monotonic() >= self._idle_at:
            self._idle, self._idle_at = with_idle(held, self._data).idle, time.monotonic() + IDLE_EVERY_S
        idle = {uuid: words for uuid, words in self._idle.items() if uuid in held.jobs}
        return msgspec.structs.replace(held, idle=idle) if idle else held

    def _reconcile(self) -> str:
        """Correct the rows of jobs whose supervisor has exited; return why this is impossible now, or "" on success."""
        try:
            reconcile(self._data, self._revive)
        except UserError as error:
            return str(error)
        pid = holder_of(self._data.control_db)
        return f"no job can be changed: the store is locked by {describe_holder(pid)}" if pid and is_halted(pid) else ""


class NewsOfJob:
    """Detects whether a job has had new events since the last check."""

    def __init__(self, watcher: Watcher, job_id: int) -> None:
        self._watcher, self._job_id, self._n_seen = watcher, job_id, len(watcher.news)

    def has_come(self) -> bool:
        """Return whether the job has had a new event since the last call."""
        news = self._watcher.news[self._n_seen :]
        self._n_seen += len(news)
        return any(one.job_id == self._job_id for one in news)

"""The queue process: manages a user's queued jobs on this host, and starts each job's supervisor when its turn comes.

`python -P -m sae_tui.jobs.queue_process DATA_DIR` forks it into the background, unless it is already running. All its
state is in the store and the run folders, so killing it loses nothing: the next command or app that runs starts it
again.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from sae_tui.jobs import detach
from sae_tui.jobs.background import go_on
from sae_tui.jobs.ending import JobEnding
from sae_tui.jobs.files import is_gone
from sae_tui.jobs.machine import SIGN_EVERY_S, is_here, this_machine
from sae_tui.jobs.mending import is_on_cluster, running_program
from sae_tui.jobs.queue.gpu_reader import left_s
from sae_tui.jobs.queue.order import in_order
from sae_tui.jobs.queue.plan import QueuePlan
from sae_tui.jobs.queue.waiting_job import Reasons, obstacle_of
from sae_tui.jobs.reconcile import is_supervised, reconcile, waits_here
from sae_tui.jobs.record import as_recorded
from sae_tui.jobs.supervisor.conclude import conclude
from sae_tui.jobs.supervisor.upgrade import Installed
from sae_tui.jobs.supervisor_log import note, tolerate, tolerate_disk
from sae_tui.jobs.user import user_name
from trainer.contract.errors import UserError
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir, umask_of
from trainer.contract.process import ProcessRef
from trainer.contract.store.job_store import Control, RequestKind
from trainer.contract.store.rows import Job
from trainer.contract.store.states import RUNNING, JobState

TICK_S = 0.25
# How often to check whether other users' processes have left a GPU. Reading the GPUs takes 0.1 s of CPU time.
READ_EVERY_S = 15.0
# The queue is planned again after this time even if nothing has changed, because reservations depend on the time.
PLAN_EVERY_S = 60.0
# The maximum number of supervisors started in one round. Each start takes 0.15 s, and a round must be short so that
# requests are noticed soon.
STARTS_PER_ROUND = 4
# If a supervisor cannot be started, another attempt is made after this time.
AGAIN_S = 3.0
# The next job's supervisor is started this long before a running job is expected to end, so that the next job's ranks
# have imported torch by then. If it waits in vain, it is not started early again until the second time has passed.
EARLY_S, EARLY_AGAIN_S = 30.0, 600.0
# The process exits once its user has had no active jobs for this long.
LEAVES_AFTER_S = 60.0

Start = Callable[[DataDir, int], None]


class QueueProcess:
    """Plans one user's queued jobs that have no supervisor."""

    def __init__(self, data: DataDir, start: Start = detach.start) -> None:
        self._data, self._start = data, start
        self._control = Control(data.control_db)
        self._host = socket.gethostname()
        self._lock = FileLock(data.queue_lock(self._host, user_name()))
        self._installed = Installed()
        self._reasons = Reasons(self._control)
        self._plans: dict[str, QueuePlan] = {}
        self._jobs: dict[int, Job] = {}
        # A pidfd for each live supervisor of this user's running jobs.
        self._supervisors: dict[ProcessRef, int] = {}
        self._refused_until: dict[int, float] = {}
        # The job whose supervisor was last started before its turn, and when it may be started early again.
        self._early, self._early_again_at = 0, 0.0
        # The store's version, and the queue's fingerprint at that version.
        self._version: tuple[int, int] | None = None
        self._queue = ""
        # Whether the queue must be planned at the next tick, for example because the last plan failed.
        self._is_due = True
        self._plan_at = self._read_at = self._sign_at = 0.0
        self._idle_since: float | None = None

    def register(self) -> bool:
        """Lock the queue; return False if another of this user's queue processes has already locked it."""
        return self._lock.acquire()

    def run(self) -> None:
        """Start jobs until there have been none for a minute, or until the data folder or the store is deleted."""
        while not (is_gone(self._data.root) or self._is_store_gone() or self._is_done()):
            self._sign()
            with tolerate("planning the queue"), tolerate_disk("planning the queue"):
                if self._has_news() or self._is_due:
                    self._is_due = True
                    self._is_due = self._plan()
            self._wait()

    def _is_store_gone(self) -> bool:
        """Return whether the store is gone and this process has no queued jobs to restore in a new one.

        A new, empty store would look as if there had never been any jobs.
        """
        return not self._jobs and not os.path.lexists(self._data.control_db)

    def _wait(self) -> None:
        """Wait for a tick or a supervisor's exit; after an exit, plan again, because its job may need a new one."""
        poller = select.poll()
        for pidfd in self._supervisors.values():
            poller.register(pidfd, select.POLLIN)
        ended = {pidfd for pidfd, _ in poller.poll(1000 * TICK_S)}
        for supervisor in [one for one, pidfd in self._supervisors.items() if pidfd in ended]:
            # Stop watching it: its pidfd stays readable, so a failing plan would be repeated without waiting for a
            # tick.
            os.close(self._supervisors.pop(supervisor))
            self._is_due = True

    def _watch(self, active: Iterable[Job]) -> None:
        """Watch the supervisors of this user's jobs, and replace dead supervisors whose programs are running."""
        before, self._supervisors = self._supervisors, {}
        for job in active:
            supervisor = job.supervisor
            if job.user != user_name() or supervisor is None or not is_here(job):
                continue
            if supervisor.is_alive():
                known = supervisor in before
                self._supervisors[supervisor] = before.pop(supervisor) if known else os.pidfd_open(supervisor.pid)
            elif job.state != JobState.QUEUED and self._may_begin(job) and not is_on_cluster(job):
                self._replace(job)
        for pidfd in before.values():
            os.close(pidfd)

    def _replace(self, job: Job) -> None:
        """Start another supervisor for a program that runs without one; for any other job, record how it ended."""
        if running_program(self._data, self._control, job):
            self._begin(job)
        else:
            self._refused_until[job.id] = time.monotonic() + AGAIN_S
            reconcile(self._data)

    def _sign(self) -> None:
        """Touch the lock file every 30 s as a sign of life for other hosts; restart if this host has been renamed."""
        if socket.gethostname() != self._host:
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
        if time.monotonic() >= self._sign_at:
            self._sign_at = time.monotonic() + SIGN_EVERY_S
            with contextlib.suppress(OSError):
                os.utime(self._data.queue_lock(self._host, user_name()))
            for plan in self._plans.values():
                plan.report_silent()

    def _has_news(self) -> bool:
        """Return whether the queue must be planned because it has changed or has not been planned for a while."""
        version = self._control.version()
        if version != self._version:
            if self._version and version[0] != self._version[0]:
                self._restore()
            before, self._queue = self._queue, self._control.fingerprint()
            self._version = version
            if self._queue != before:
                return True
        if time.monotonic() >= self._plan_at:
            return True
        if time.monotonic() < self._read_at:
            return False
        self._read_at = time.monotonic() + READ_EVERY_S
        is_gone_any = any(is_gone(self._data.run(job_id).root) for job_id in self._jobs)
        return is_gone_any or any([plan.has_changed() for plan in self._plans.values()])

    def _restore(self) -> None:
        """Restore the rows of the queued jobs in a store that has replaced a deleted one."""
        for job in self._jobs.values():
            self._control.restore(as_recorded(self._data.run(job.id), job))

    def _plan(self) -> bool:
        """Serve the requests to queued jobs, start the jobs whose turn it is, and record why the others wait.

        Return whether the queue must be planned again at the next tick.
        """
        self._plan_at, self._read_at = time.monotonic() + PLAN_EVERY_S, time.monotonic() + READ_EVERY_S
        active = self._control.active_jobs()
        self._watch(active)
        mine = [job for job in active if job.state == JobState.QUEUED and self._is_mine(job)]
        requests = self._control.requests_to_queued()
        waiting = [job for job in mine if self._serve(job, requests.get(job.id, set()))]
        n_left = len(mine) - len(waiting)
        self._jobs = {job.id: job for job in waiting}
        reasons: list[tuple[Job, str]] = []
        ready: dict[str, list[Job]] = {}
        for job in waiting:
            if reason := obstacle_of(self._data, self._control, job):
                reasons.append((job, reason))
            else:
                ready.setdefault(job.gpu_source, []).append(job)
        n_started = 0
        for source, jobs in ready.items():
            waits, n = self._start_jobs(source, jobs, active)
            reasons, n_started = [*reasons, *waits], n_started + n
            if not n:
                self._start_early(source, jobs, active)
        self._reasons.record_all(reasons)
        return bool(n_left) or n_started >= STARTS_PER_ROUND

    def _is_mine(self, job: Job) -> bool:
        """Return whether this process must start a job; if this machine was renamed or rebooted, update the row."""
        if job.id in self._jobs:
            return not (job.supervisor and is_supervised(self._data, job))
        if not waits_here(self._data, job):
            return False
        here = this_machine()
        if any(getattr(job, name) != value for name, value in here.items()):
            self._control.update(job.id, **here)
        return True

    def _serve(self, job: Job, requests: set[RequestKind]) -> bool:
        """Serve the requests to a queued job; return whether it stays in the queue unchanged."""
        if "pause" in requests:
            self._control.update(job.id, held=True)
            self._control.answer(job.id, "pause")
        ending = None
        if requests & {"stop", "kill"}:
            ending = JobEnding(state=JobState.STOPPED, ended=time.time())
        elif is_gone(self._data.run(job.id).root):
            ending = JobEnding(state=JobState.FAILED, ended=time.time(), error="its run folder was deleted")
        if ending and (ended := conclude(self._data, self._control, job, ending)):
            self._run_hook(ended)
        return not (ending or "pause" in requests)

    def _run_hook(self, job: Job) -> None:
        # Import the module here because a queue without a hook needs no settings.
        from sae_tui.jobs.supervisor.end_hook import run_hook

        run_hook(self._data, job)

    def _start_jobs(self, source: str, jobs: Sequence[Job], active: Sequence[Job]) -> tuple[list[tuple[Job, str]], int]:
        """Start the jobs whose turn it is, in queue order, but at most `STARTS_PER_ROUND` of them.

        Return the jobs that wait, each with the reason, and the number of attempted starts.
        """
        plan = self._plans.setdefault(source, QueuePlan(self._data, self._control, self._host, source))
        turns, waits, n_started = plan.turns(jobs, active), list[tuple[Job, str]](), 0
        for job in in_order(jobs):
            if reason := turns[job.id].waits_for:
                waits.append((job, reason))
            elif n_started < STARTS_PER_ROUND and self._may_begin(job):
                plan.report_halted()
                if reason := self._begin(job):
                    waits.append((job, reason))
                n_started += 1
        return waits, n_started

    def _start_early(self, source: str, jobs: Sequence[Job], active: Sequence[Job]) -> None:
        """Start the supervisor of the job that is next, if a running job ends soon; otherwise, plan again in time.

        Only one supervisor waits at a time.
        """
        left = {job.id: left_s(job) for job in active if job.state in RUNNING and job.host == self._host}
        first_s = min(left.values(), default=math.inf)
        if first_s > EARLY_S:
            self._plan_at = min(self._plan_at, time.monotonic() + max(1.0, first_s - EARLY_S))
            return
        if any(job.state == JobState.QUEUED and job.supervisor in self._supervisors for job in active):
            return
        ending = [job_id for job_id, seconds in left.items() if seconds <= EARLY_S]
        job = self._plans[source].next_after(ending, jobs, active)
        if job is None or not self._may_begin(job):
            return
        if job.id != self._early or time.monotonic() >= self._early_again_at:
            self._early, self._early_again_at = job.id, time.monotonic() + EARLY_AGAIN_S
            self._begin(job)

    def _may_begin(self, job: Job) -> bool:
        return self._refused_until.get(job.id, 0.0) <= time.monotonic()

    def _begin(self, job: Job) -> str:
        """Start a job's supervisor, which then locks the GPUs; return why this failed, or "" on success."""
        if not self._installed.restart_if_replaced():
            return "sae-tui is being upgraded"
        try:
            self._start(self._data, job.id)
        except UserError as error:
            self._refused_until[job.id] = again_at = time.monotonic() + AGAIN_S
            # The failed start changes nothing in the queue, so plan again even without news.
            self._plan_at = min(self._plan_at, again_at)
            note(f"job {job.id}: its supervisor cannot be started: {error}")
            return f"its supervisor cannot be started: {error}"
        return ""

    def _is_done(self) -> bool:
        """Return whether this user has had no active jobs for a minute; if so, the lock is released."""
        if self._jobs:
            self._idle_since = None
            return False
        self._idle_since = self._idle_since or time.monotonic()
        if time.monotonic() - self._idle_since < LEAVES_AFTER_S:
            return False
        self._idle_since = None
        # A job recorded before the release is found here; for one recorded later, the launcher finds the lock free, and
        # starts another queue process.
        self._lock.release()
        with tolerate("looking for jobs"):
            if not any(job.user == user_name() for job in self._control.active_jobs()):
                return True
        return not self._lock.acquire()


def main(arguments: Sequence[str], start: Start = detach.start) -> int:
    """Fork the queue process; in the parent, return 0 once a queue process of this user has locked the queue."""

    def begin() -> Callable[[], None]:
        data = DataDir(Path(arguments[0]))
        os.umask(umask_of(data.root))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        queue = QueueProcess(data, start)
        return queue.run if queue.register() else lambda: None

    return go_on(begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

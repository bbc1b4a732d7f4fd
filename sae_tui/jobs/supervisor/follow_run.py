"""Forwards requests from the store to the running job, and copies the job's progress to its row in the store."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from typing import Any

import msgspec

from sae_tui.jobs.asking import asked_of
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.record import as_recorded
from sae_tui.jobs.supervisor_log import tolerate
from trainer.contract.paths import RunPaths
from trainer.contract.planning.plan import read_plan
from trainer.contract.settings.job import Launch
from trainer.contract.store.job_store import ENDING, Control, RequestKind
from trainer.contract.store.metrics_store import (
    JUDGING,
    MIRRORING,
    WAITING,
    Heartbeat,
    is_before_first_step,
    may_take_long,
)
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState

TIMES_MEDIAN = 10
PUBLISH_EVERY_S = 1.0
# The time limit for starting an attempt. Importing torch and joining the process group take 10 to 30 s on a busy
# machine.
SLOW_START_S = 120.0
# Maps each request to end the job, the most urgent first, to an event message; `{}` is what the job does before it
# ends.
_WORDS: dict[RequestKind, str] = {
    "kill": "was asked to end immediately",
    "stop": "was asked to stop; {}",
    "pause": "was asked to pause; {}, and the job is then paused",
}


class StallWatch:
    """Detects stalls by comparing the time since the last step or phase change with the usual step duration."""

    def __init__(self, after_s: float, now: float) -> None:
        self._after_s = after_s
        self._place: tuple[str, int] | None = None
        self._since = now
        self._paces: deque[float] = deque(maxlen=63)

    def is_stalled(self, place: tuple[str, int], now: float) -> bool:
        """Return whether there has been no progress for more than `limit_s` seconds.

        `place` is the phase and the step, and `now` is a monotonic time in seconds.
        """
        if place != self._place:
            # A start or a phase change takes much longer, so use only step durations within a phase.
            if self._place is not None and place[0] == self._place[0]:
                self._paces.append(now - self._since)
            self._place, self._since = place, now
        return self.quiet_s(now) > self.limit_s

    def begin(self, now: float) -> None:
        """Measure the time without progress from `now` on."""
        self._since = now

    def quiet_s(self, now: float) -> float:
        """Return the seconds since the last sign of progress."""
        return now - self._since

    @property
    def limit_s(self) -> float:
        median = sorted(self._paces)[len(self._paces) // 2] if self._paces else 0.0
        return max(self._after_s, TIMES_MEDIAN * median)


class Watch:
    """Follows one attempt of a job; the methods tolerate a store that is temporarily unavailable."""

    def __init__(
        self, control: Control, job: Job, paths: RunPaths, launch: Launch, *, counts_steps: bool = True
    ) -> None:
        """Follow an attempt; without `counts_steps`, it counts as running once it has started, and never stalls."""
        self._control = control
        self._counts_steps = counts_steps
        self._job = job
        self._state = job.state
        self._paths = paths
        self._run = LiveRun(paths)
        self._run.poll()
        # The previous attempt's last heartbeat, which must not be mistaken for one from this attempt.
        self._old_heartbeat = self._run.heartbeat
        self._mode = job.mode
        self._plan_file = paths.attempt(job.attempt) / "plan.json"
        # Only ranks write a plan.
        self._planned = not counts_steps
        self._ends_stalled_after_s = launch.end_stalled_after_s or math.inf
        self._stall = StallWatch(launch.stalled_after_s, time.monotonic())
        # The version is initially None so that the first poll also reads requests made during startup.
        self._seen_version: tuple[int, int] | None = None
        self._published: dict[str, Any] = {}
        self._publish_at = 0.0
        self._has_news = self._is_quiet = False
        # Whether the attempt is waiting in an external queue; known only during a poll.
        self._is_waiting = False
        # Rank 0 touches its spec file to report steps that it cannot store.
        self._sign, self._signed_ns = paths.rank_spec(job.attempt), 0
        self._late_at = self._slow_at = time.monotonic() + SLOW_START_S
        # The requests made during this attempt to stop, pause or kill the job.
        self.requests: set[RequestKind] = set()
        self._is_stopping = self._asked_to_finish = False

    @property
    def asked_to_stop(self) -> bool:
        return bool(self.requests)

    @property
    def asked_to_finish(self) -> bool:
        """True if the job was asked to cool down and finish, which is not a stop request."""
        return self._asked_to_finish

    @property
    def asked_to_kill(self) -> bool:
        return "kill" in self.requests

    @property
    def is_stalled(self) -> bool:
        return self._state == JobState.STALLED

    @property
    def is_given_up(self) -> bool:
        """True if no step completed within the time limit, unless this phase may take long."""
        phase = self._heartbeat.phase if self._heartbeat else ""
        return self.is_overdue and not (phase == JUDGING or may_take_long(phase))

    @property
    def is_overdue(self) -> bool:
        """True if no step completed within the time limit, in any phase; used for ranks that cannot continue."""
        # The time limit is longer if steps usually take minutes.
        return (
            self._counts_steps
            and not self._is_starting
            and self.quiet_s > max(self._ends_stalled_after_s, self._stall.limit_s)
        )

    @property
    def _heartbeat(self) -> Heartbeat | None:
        return None if self._run.heartbeat == self._old_heartbeat else self._run.heartbeat

    @property
    def _is_starting(self) -> bool:
        """True before the first step, until the time limit for starting has passed."""
        is_before = self._heartbeat is None or is_before_first_step(self._heartbeat.phase)
        return is_before and time.monotonic() < self._late_at

    @property
    def quiet_s(self) -> float:
        return self._stall.quiet_s(time.monotonic())

    def poll(self) -> bool:
        """Read requests on every call, and publish progress about once per second.

        Return whether the job's row had to be restored in a new store. If so, the caller must record the ranks again.
        """
        was_lost = False
        with tolerate("following the job"):
            was_lost = self._read_requests()
        if time.monotonic() >= self._publish_at:
            self._publish_at = time.monotonic() + PUBLISH_EVERY_S
            self._look()
            with tolerate("following the job"):
                self._publish()
        self._is_waiting = False
        return was_lost

    def _look(self) -> None:
        """Read the run's progress, but not the control store, so that a locked store is not mistaken for a hang."""
        self._has_news |= self._run.poll()
        with contextlib.suppress(OSError):
            before, self._signed_ns = self._signed_ns, self._sign.stat().st_mtime_ns
            if before not in (0, self._signed_ns):  # Rank 0 is taking steps that it cannot store.
                self._stall.begin(time.monotonic())
        if heartbeat := self._heartbeat:
            self._is_quiet = self._stall.is_stalled((heartbeat.phase, heartbeat.step), time.monotonic())

    def nothing_expected(self) -> None:
        """Restart the time limits for starts and stalls; called while the attempt is waiting in an external queue."""
        self._is_waiting = True
        self._stall.begin(time.monotonic())
        self._late_at = self._slow_at = time.monotonic() + SLOW_START_S

    def request_stop(self, why: str = "") -> None:
        """Ask the job to save and stop, as a user would; the default reason is that its supervisor was asked to end."""
        why = why or f"its supervisor was asked to end; {asked_of(self._job.config).asked}"
        with tolerate("asking for a stop"):
            self._control.request(self._job.id, "stop")
            self._move(JobState.STOPPING, why)
            self._is_stopping = True
            self.requests.add("stop")

    def close(self) -> None:
        """Publish the last values, written by rank 0 just before it exited."""
        self._look()
        with tolerate("publishing the last values"):
            self._publish()
        self._run.close()

    def _read_requests(self) -> bool:
        version, was_lost = self._control.version(), False
        if version != self._seen_version:
            if self._seen_version and version[0] != self._seen_version[0]:
                self._restore_row()
                was_lost = True
            asked = self._control.open_requests(self._job.id)
            self.requests |= asked & ENDING
            self._asked_to_finish |= "finish" in asked
            self._seen_version = version
        if self.requests and not self._is_stopping:
            # If the store is unavailable, `_move` raises an error, and the next call retries.
            kind = next(kind for kind in _WORDS if kind in self.requests)
            message = _WORDS[kind].format(asked_of(self._job.config).asked)
            self._move(JobState.STOPPING, message, "warning" if kind == "kill" else "info")
            self._is_stopping = True
        return was_lost

    def _restore_row(self) -> None:
        """Restore the job's row in the store that has replaced a deleted one."""
        job = msgspec.structs.replace(self._job, state=self._state)
        if self._control.restore(as_recorded(self._paths, job)):
            message = "the store was replaced while the job ran; earlier events are in its run folder"
            self._control.add_event(self._job.id, "restored", message, "warning")
        elif self._state != JobState.STARTING:
            # A repair has already restored the row, but with the state at the start of the attempt.
            for state in (JobState.RUNNING, self._state):
                self._control.transition(self._job.id, state)
        self._published = {}

    def _publish(self) -> None:
        self._tell_mode()
        if not self._counts_steps:
            self._judge_program()
        elif self._heartbeat is None:
            self._warn_of_slow_start()
            return
        else:
            self._judge(self._heartbeat.phase)
        fields = self._run.fields() if self._has_news else self._published
        if fields != self._published:
            self._control.update(self._job.id, **fields)
            self._published = fields
        self._has_news = False

    def _tell_mode(self) -> None:
        """Record, once, the mode chosen by the ranks.

        Until then, the row contains the mode predicted for `auto`.
        """
        if self._planned or (plan := read_plan(self._plan_file)) is None:
            return
        if plan.mode != self._mode:
            self._control.update(self._job.id, mode=plan.mode)
        self._planned = True

    def _warn_of_slow_start(self) -> None:
        """Warn once about a slow start; ranks hung before their first step do not write heartbeats."""
        if self._state == JobState.STARTING and time.monotonic() > self._slow_at:
            message = f"has not started to train after {SLOW_START_S:.0f} s; its logs may show why"
            self._control.add_event(self._job.id, "slow-start", message, "warning")
            self._slow_at = math.inf

    def _judge(self, phase: str) -> None:
        """Set the job's state: running after the first heartbeat, or stalled after too long without progress."""
        stalled = self._is_quiet and not (self._is_starting or phase.startswith((WAITING, MIRRORING)))
        if self._state == JobState.STARTING:
            self._move(JobState.RUNNING, "is running")
        elif self._state == JobState.RUNNING and stalled:
            self._move(JobState.STALLED, f"has taken no step for {self._stall.limit_s:.0f} s", "warning")
        elif self._state == JobState.STALLED and not stalled:
            self._move(JobState.RUNNING, "is taking steps again")

    def _judge_program(self) -> None:
        if self._state == JobState.STARTING and not self._is_waiting:
            self._move(JobState.RUNNING, "is running")

    def _move(self, to: JobState, message: str, level: str = "info") -> None:
        if self._control.transition(self._job.id, to):
            self._state = to
            self._control.add_event(self._job.id, str(to), message, level)

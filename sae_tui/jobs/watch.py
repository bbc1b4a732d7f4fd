"""Carries news between a running job and its row in the store: requests in, progress out."""

from __future__ import annotations

import math
import time
from typing import Any

from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.notes import tolerated
from sae_tui.jobs.stall import StallWatch
from trainer.contract.control import Control, Job
from trainer.contract.paths import RunPaths
from trainer.contract.plan import read_plan
from trainer.contract.states import JobState

PUBLISH_EVERY_S = 1.0
# Importing torch and joining the process group take 10 to 30 s on a busy machine.
SLOW_START_S = 120.0


class Watch:
    """Follows one running job; every call is tolerant of a store that cannot be used just now."""

    def __init__(self, control: Control, job: Job, paths: RunPaths) -> None:
        self._control = control
        self._job_id = job.id
        self._state = job.state
        self._run = LiveRun(paths)
        self._mode = job.mode
        self._plan_file = paths.attempt(job.attempt) / "plan.json"
        self._planned = False
        self._stall = StallWatch()
        self._seen_version: int | None = None
        self._published: dict[str, Any] = {}
        self._publish_at = 0.0
        self._slow_at = time.monotonic() + SLOW_START_S
        self.asked_to_stop = False
        self.asked_to_kill = False

    def poll(self) -> None:
        """Reads requests at every call, and publishes progress about once a second."""
        with tolerated("following the job"):
            self._read_requests()
            if time.monotonic() >= self._publish_at:
                self._publish_at = time.monotonic() + PUBLISH_EVERY_S
                self._publish()

    def request_stop(self) -> None:
        """Asks rank 0 to save and stop, as a user would."""
        with tolerated("asking for a stop"):
            self._control.request(self._job_id, "stop")
            self._stopping("its supervisor was told to end; the ranks save and stop")

    def close(self) -> None:
        """Publishes the last values, which rank 0 wrote as it ended."""
        with tolerated("publishing the last values"):
            self._publish()
        self._run.close()

    def _read_requests(self) -> None:
        version = self._control.version()
        if version == self._seen_version:
            return
        requests = self._control.requested(self._job_id)
        self.asked_to_kill = self.asked_to_kill or "kill" in requests
        if self.asked_to_kill and not self.asked_to_stop:
            self._stopping("was asked to end at once", level="warning")
        elif requests and not self.asked_to_stop:
            self._stopping("was asked to stop: its ranks agree on a step and save")
        self._seen_version = version

    def _stopping(self, message: str, level: str = "info") -> None:
        """Raises where the store cannot take it, so that it is tried again."""
        self._move(JobState.STOPPING, message, level)
        self.asked_to_stop = True

    def _publish(self) -> None:
        self._tell_mode()
        news = self._run.poll()
        if self._run.heartbeat is None:
            self._warn_of_slow_start()
            return
        self._judge(self._run.heartbeat.step)
        fields = self._run.fields()
        if news and fields != self._published:
            self._control.update(self._job_id, **fields)
            self._published = fields

    def _tell_mode(self) -> None:
        """Once: what the ranks settled on, in place of what `auto` was taken for when the job was recorded."""
        if self._planned or (plan := read_plan(self._plan_file)) is None:
            return
        if plan.mode != self._mode:
            self._control.update(self._job_id, mode=plan.mode)
        self._planned = True

    def _warn_of_slow_start(self) -> None:
        """Once: ranks that hang before their first step give no heartbeat that could be judged."""
        if self._state == JobState.STARTING and time.monotonic() > self._slow_at:
            message = f"has not begun to train after {SLOW_START_S:.0f} s; its logs may say why"
            self._control.add_event(self._job_id, "slow-start", message, "warning")
            self._slow_at = math.inf

    def _judge(self, step: int) -> None:
        """The first heartbeat means running; no step for unusually long means stalled."""
        stalled = self._stall.stalled(step, time.monotonic())
        if self._state == JobState.STARTING:
            self._move(JobState.RUNNING, "is running")
        elif self._state == JobState.RUNNING and stalled:
            self._move(JobState.STALLED, f"has made no step for {self._stall.limit_s:.0f} s", "warning")
        elif self._state == JobState.STALLED and not stalled:
            self._move(JobState.RUNNING, "makes steps again")

    def _move(self, to: JobState, message: str, level: str = "info") -> None:
        if self._control.transition(self._job_id, to):
            self._state = to
            self._control.add_event(self._job_id, str(to), message, level)

"""Injects reboots, reused pids and clock changes. Each function injects one fault."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from faults.real_host import preloaded
from faults.real_job import RealJob, Result, boxed
from jobs.conftest import Box, wait_for

from sae_tui.jobs import detach
from sae_tui.jobs.launch import launching
from sae_tui.jobs.reconcile import reconcile
from sae_tui.jobs.view.reader import JobReader
from trainer.contract.process import ProcessRef
from trainer.contract.runs.lock import is_held
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

HOUR_S, DAY_S = 3600, 86400
_HELD = {"hold": True}


def machine_restarted(root: Path, like: Result) -> float:
    """Simulate what a reboot does to a job: no process is left, and its rows contain another boot id and reused pids.

    Return the seconds until the job is lost.
    """
    with boxed(root) as box, other_user() as other:
        job = _cut_power(RealJob(box).at_step(60))
        _make_rows(job, other, boot_id="the-boot-before")
        began = time.monotonic()
        assert reconcile(box.data) == [job.id]
        taken = time.monotonic() - began
        job.require(JobState.LOST, "the machine was restarted")
        assert other.is_alive(), "another process was signalled"
        job.mend()
        job.go_on().ended()
        job.require(JobState.FINISHED)
        job.require_same(like)
        return taken


def queue_restarted(root: Path) -> float:
    """Simulate a reboot of a machine with queued jobs; return the seconds until the queue runs again.

    One job runs, another waits for it, and a third is held. The queue must keep its order, and the second job must run
    after the first has been resumed.
    """
    with boxed(root) as box, other_user() as other:
        job = RealJob(box, n_steps=200).at_step(20)
        after, held = (RealJob(box, place=place, gpus=False, n_steps=60) for place in ({"after": (job.id,)}, _HELD))
        for one in (after, held):
            one.kill(supervisor=True)
        _cut_power(job)
        for one in (job, after, held):
            _make_rows(one, other, boot_id="the-boot-before")
        began = time.monotonic()
        assert reconcile(box.data) == [job.id]
        detach.start_queue(box.data)
        taken = time.monotonic() - began
        job.require(JobState.LOST, "the machine was restarted")
        assert [one.row.state for one in (after, held)] == [JobState.QUEUED] * 2
        assert (after.row.after, held.row.held) == ((job.id,), True)
        job.go_on().ended()
        after.ended()
        for one in (job, after):
            one.require(JobState.FINISHED)
        assert held.row.state == JobState.QUEUED, "a held job has started"
        held.stop().ended()
        assert other.is_alive(), "another process was signalled"
        return taken


def renamed(root: Path) -> float:
    """Kill a job's processes and rename the machine; return the seconds until none of the job's processes are left."""
    with boxed(root) as box:
        job = _cut_power(RealJob(box).at_step(60))
        box.control.move(job.id, "its-name-before")
        taken = job.mend()
        job.require(JobState.LOST, "disappeared")
        job.go_on().at_step(80).stop().ended()
        job.require(JobState.STOPPED)
        assert job.row.host == socket.gethostname()
        return taken


def pids_reused(root: Path) -> float:
    """Give a supervisor's and its ranks' pids to a process with another start time.

    Return the seconds until the job is lost.
    """
    with boxed(root) as box, other_user() as other:
        job = _cut_power(RealJob(box).at_step(60))
        _make_rows(job, other, start_ticks=other.start_ticks - 1)
        began = time.monotonic()
        assert reconcile(box.data) == [job.id]
        taken = time.monotonic() - began
        job.require(JobState.LOST, f"its supervisor (pid {other.pid}) disappeared")
        assert other.is_alive(), "another process was signalled"
        job.mend()
        return taken


def clock_set_back(root: Path, like: Result) -> float:
    """Set the clock back by an hour, then kill a rank. Only the displayed times may be affected."""
    with boxed(root) as box:
        clock = Clock(root)
        job = RealJob(box, launch={"max_restarts": 1}, start=clock.start).at_step(60)
        clock.set_to(-HOUR_S)
        at = job.step
        job.at_step(at + 20)
        job.kill(1)
        began = time.monotonic()
        wait_for(lambda: job.row.attempt == 2, "a restart", 30)
        taken = time.monotonic() - began
        job.ended()
        row = job.require(JobState.FINISHED)
        assert row.ended < row.started, "the clock was not set back"
        job.mend()
        kinds = [event.kind for event in box.control.events(job.id)]
        assert kinds == ["running", "restarting", "running", "finished"], kinds
        _require_ordered(job)
        job.require_same(like)
        return taken


def clock_steps(root: Path, dice: random.Random, like: Result, n_ranks: int = 1) -> float:
    """Set the clock at least an hour ahead or back while one job runs and another waits for its GPUs, then correct it.

    Neither job may end early, be reported as stalled or lose a step. Return the seconds from the first clock change
    to the end of both jobs.
    """
    with boxed(root) as box:
        clock = Clock(root)
        job = RealJob(box, n_ranks, start=clock.start)
        waits = RealJob(box, n_ranks, n_steps=60, start=clock.start)
        clock.say(box)
        job.at_step(dice.randint(1, 150))
        began = time.monotonic()
        for seconds in (dice.choice([-DAY_S, -HOUR_S, HOUR_S, DAY_S, 365 * DAY_S]), 0):
            clock.set_to(seconds)
            clock.say(box)
            at = job.step
            job.at_step(min(at + dice.randint(10, 100), 390))
            assert job.row.state == JobState.RUNNING, job.row.state
        for one in (job, waits):
            one.ended()
            one.require(JobState.FINISHED)
            assert one.row.attempt == 1, "the job was restarted"
        taken = time.monotonic() - began
        waits.mend()
        kinds = [event.kind for event in box.control.events(job.id)]
        assert kinds == ["running", "finished"], kinds
        job.require_same(like)
        return taken


def orphans_while_clock_is_set_back(root: Path) -> float:
    """Orphan halted ranks, and set the clock back after they have been noticed. The ranks must still be killed."""
    with boxed(root) as box:
        job = RealJob(box).at_step(60)
        job.kill(0, 1, number=signal.SIGSTOP)
        job.kill(supervisor=True)
        wait_for(lambda: not job.row.supervisor.is_alive(), "the supervisor's end")
        assert reconcile(box.data) == []
        _shift_events(box.control, HOUR_S)
        assert reconcile(box.data) == []
        events = [event for event in box.control.events(job.id) if event.kind == "orphaned"]
        assert len(events) == 2, "the orphans would be kept until the clock reaches that time again"
        _shift_events(box.control, -HOUR_S)
        began = time.monotonic()
        reconcile(box.data)
        taken = time.monotonic() - began + job.mend()
        job.require(JobState.LOST, "disappeared")
        return taken


@contextlib.contextmanager
def other_user() -> Iterator[ProcessRef]:
    with subprocess.Popen(["sleep", "600"]) as process:
        ref = ProcessRef.of(process.pid)
        assert ref
        try:
            yield ref
        finally:
            process.kill()


class Clock:
    """An adjustable wall clock for a job's processes. Monotonic clocks are not affected."""

    def __init__(self, root: Path) -> None:
        self._file = root / "steps"
        self._file.write_bytes(bytes(4096))
        self._variables = {"LD_PRELOAD": str(preloaded("stepped_clock")), "STEPS": str(self._file)}
        names = [f"{name}={value}" for name, value in self._variables.items()]
        self.start: launching.Start = functools.partial(detach.start, command=["env", *names, *detach.SUPERVISOR])

    def set_to(self, seconds: int) -> None:
        """Set the clock `seconds` ahead of the true time."""
        with self._file.open("r+b") as file:
            lines = file.read().rstrip(b"\0") + f"{int(time.time())} {seconds}\n".encode()
            file.seek(0)
            file.write(lines)

    def say(self, box: Box) -> None:
        """Run the `jobs` command with this clock. Like all commands about jobs, it checks for lost jobs."""
        command = [sys.executable, "-m", "sae_tui", "--data-dir", str(box.data.root), "jobs"]
        done = subprocess.run(command, env=os.environ | self._variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def _cut_power(job: RealJob) -> RealJob:
    """Simulate what a power cut does to a job: no process is alive, although the job's rows say that it is running."""
    # The queue process would correct the rows.
    if queue := job.box.queue_process():
        queue.send(signal.SIGKILL)
        wait_for(lambda: not queue.is_alive(), "the end of the queue process")
    job.kill(0, 1, supervisor=True)
    wait_for(lambda: not job.processes() and not is_held(job.paths.lock_file), "the end of all its processes")
    assert job.row.state == JobState.RUNNING
    return job


def _make_rows(job: RealJob, other: ProcessRef, *, boot_id: str | None = None, start_ticks: int | None = None) -> None:
    named = other.pid, start_ticks or other.start_ticks, boot_id or other.boot_id, job.id
    with contextlib.closing(Control(job.box.data.control_db)) as control, control._write() as db:
        db.execute("UPDATE jobs SET supervisor_pid = ?, supervisor_start = ?, boot_id = ? WHERE id = ?", named)
        db.execute("UPDATE ranks SET pid = ?, start_ticks = ?, boot_id = ? WHERE job_id = ?", named)


def _shift_events(control: Control, seconds: float) -> None:
    with control._write() as db:
        db.execute("UPDATE events SET timestamp = timestamp + ? WHERE kind = 'orphaned'", (seconds,))


def _require_ordered(job: RealJob) -> None:
    """Check that curves are ordered by step, and each source's events by arrival."""
    reader = JobReader(job.box.data, job.id)
    reader.poll()
    steps = [point.step for point in reader.series[("loss", 0)]]
    shown = [event.kind for event in reader.events if event.kind in ("running", "restarting", "resumed", "finished")]
    reader.close()
    assert steps == sorted(steps), "the steps of the curve are not ascending"
    assert [kind for kind in shown if kind != "resumed"] == ["running", "restarting", "running", "finished"], shown

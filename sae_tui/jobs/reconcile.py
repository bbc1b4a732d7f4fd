"""Mends the rows of jobs whose supervisor is gone without a word: `kill -9`, a crash, a restart of the machine."""

from __future__ import annotations

import math
import signal
import socket
import time
from typing import Any

from sae_tui.jobs.ending import read_ending
from sae_tui.jobs.live import LiveRun
from trainer.contract.control import Control
from trainer.contract.paths import DataDir
from trainer.contract.process import boot_id
from trainer.contract.records import Job, Rank
from trainer.contract.states import JobState
from trainer.contract.store import StoreMissing

# A launcher records the supervisor within a second; under heavy load it may take longer.
UNSUPERVISED_S = 30.0
# Ranks get SIGTERM when their supervisor dies; this is the time they have to save.
ORPHANS_S = 60.0


def reconcile(data: DataDir) -> list[int]:
    """The ids of the jobs whose state was changed; cheap where there is nothing to mend."""
    try:
        reader = Control(data.control_db, readonly=True)
    except StoreMissing:
        return []
    try:
        orphaned = [job for job in reader.active_jobs() if _is_orphaned(job)]
    finally:
        reader.close()
    if not orphaned:
        return []
    control = Control(data.control_db)
    try:
        return [job.id for job in orphaned if _mend(data, control, job)]
    finally:
        control.close()


def _is_orphaned(job: Job) -> bool:
    """Nothing can be said of a job on another machine, nor of one whose supervisor is just being started."""
    if job.host != socket.gethostname():
        return False
    if job.supervisor is None:
        # One that is resumed was created long ago. Either way: a clock that was set back keeps it there no longer.
        return abs(time.time() - (job.queued or job.created)) > UNSUPERVISED_S
    return not job.supervisor.is_alive()


def _mend(data: DataDir, control: Control, job: Job) -> bool:
    ending = read_ending(data.run(job.id).exit_file)
    if ending and ending.state.is_final:
        return control.transition(job.id, ending.state, **ending.fields())
    living = [rank for rank in control.ranks(job.id) if rank.process.is_alive()]
    if living:
        _wait_or_kill(control, job, living)
        return False
    if job.backend == "slurm":
        from sae_tui.jobs.launchers.slurm import cancel_left_behind

        # Before the row says so: whoever sees a lost job may start it again.
        cancel_left_behind(data.run(job.id).attempt(job.attempt))
    left, has_finished = _left(data, job)
    if has_finished:
        return _end(control, job, JobState.FINISHED, "its ranks finished without their supervisor", "info", left)
    reason = _reason(data, job)
    return _end(control, job, JobState.LOST, reason, "error", left | {"error": reason})


def _end(control: Control, job: Job, state: JobState, message: str, level: str, fields: dict[str, Any]) -> bool:
    if not control.transition(job.id, state, **fields):
        return False
    control.add_event(job.id, str(state), message, level)
    return True


def _left(data: DataDir, job: Job) -> tuple[dict[str, Any], bool]:
    """What its ranks got done after the supervisor had gone, and whether nothing of the job is missing."""
    run = LiveRun(data.run(job.id))
    run.poll()
    fields, beat = run.fields(), run.heartbeat
    run.close()
    output = data.exported(job.id)
    if output:
        fields["output_path"] = output
    # A job that was to go on longer may have lost its supervisor before any rank began.
    is_last = beat is not None and beat.phase == "finished" and beat.step >= (job.total_steps or 0)
    return fields, is_last and output is not None


def _wait_or_kill(control: Control, job: Job, living: list[Rank]) -> None:
    """Lets orphaned ranks save for a minute, counted from the event that says so, then ends them.

    It counts anew where the clock has been set back since.
    """
    told = [event.timestamp for event in control.events(job.id) if event.kind == "orphaned"]
    since = told[-1] if told else math.inf
    if since > time.time():
        message = f"its supervisor is gone; {len(living)} of its ranks are still alive and saving"
        control.add_event(job.id, "orphaned", message, "warning")
    elif time.time() - since > ORPHANS_S:
        for rank in living:
            rank.process.send(signal.SIGKILL)


def _reason(data: DataDir, job: Job) -> str:
    if job.supervisor is None:
        return "its supervisor never started"
    if job.boot_id != boot_id():
        return "the machine was restarted"
    if not data.run(job.id).root.is_dir():
        return "its run folder was deleted"
    return f"its supervisor (pid {job.supervisor_pid}) disappeared"

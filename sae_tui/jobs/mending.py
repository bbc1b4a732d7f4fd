"""Corrects the row of a job whose supervisor died without recording how the job ended.

The functions here decide how the job ended. `reconcile` finds such jobs.
"""

from __future__ import annotations

import contextlib
import math
import os
import pkgutil
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sae_tui.jobs import going
from sae_tui.jobs.asking import asked_of
from sae_tui.jobs.ending import read_ending
from sae_tui.jobs.launchers.attached import find_program
from sae_tui.jobs.live import LiveRun
from sae_tui.jobs.machine import elsewhere, is_here, silence
from sae_tui.jobs.output import kind_of, output_of
from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json, write_json
from trainer.contract.paths import DataDir, RunPaths
from trainer.contract.process import ProcessRef, is_of_this_boot
from trainer.contract.runs.lock import is_held, is_holder
from trainer.contract.runs.rank_spec import rank_command
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job, Rank
from trainer.contract.store.states import JobState
from trainer.contract.wording import join_words, plural

# Ranks receive SIGTERM when their supervisor dies, and then have this long to save.
ORPHANS_S = 60.0


def end_jobs_elsewhere(data: DataDir, host: str = "") -> Iterator[str]:
    """End the jobs on a host that is permanently gone, and yield a message for each job.

    If `host` is "", end only jobs that cannot be alive on any host, and yield a message for each job whose host has
    long been silent. Never change jobs that were recently active. Raise `UserError` if `host` has no active jobs.
    """
    control = Control(data.control_db)
    try:
        away = [job for job in control.active_jobs() if not is_here(job)]
        if not host:
            yield from _judge_silent(data, control, away)
            return
        jobs = [job for job in away if job.host == host]
        if not jobs:
            others = sorted({job.host for job in away})
            there = f"only from {join_words(others)}" if others else "or from any other host"
            raise UserError(f"there are no active jobs from host {host}, {there}")
        for job in jobs:
            yield _end_elsewhere(data, control, job)
    finally:
        control.close()


def _judge_silent(data: DataDir, control: Control, away: Iterable[Job]) -> Iterator[str]:
    for job in away:
        heard = silence(data, job)
        if heard.is_certain:
            yield _end_elsewhere(data, control, job)
        elif heard.is_long:
            yield f"job {job.id} ({job.name}) is unchanged: {elsewhere(data, job)}"


def _end_elsewhere(data: DataDir, control: Control, job: Job) -> str:
    heard = silence(data, job)
    if not heard.is_long:
        return f"job {job.id} is unchanged: its host {job.host} {heard.words}; stop it instead"
    fields, has_finished = _final_progress(data, job)
    reason = f"its host {job.host} {heard.words}"
    if has_finished:
        _end(control, job, JobState.FINISHED, f"its ranks finished; {reason}", "info", fields)
        return f"job {job.id} has finished"
    _end(control, job, JobState.LOST, reason, "error", fields | {"error": reason})
    return f"job {job.id} was lost: {reason}; `sae-tui resume {job.id}` {asked_of(job.config).again} here"


def record_cut_off(data: DataDir, control: Control, job_id: int) -> None:
    """Record that a job's evaluation process was killed, unless another process is evaluating the job now."""
    if is_held(data.run(job_id).evaluation_lock) or not going.remove(data, job_id):
        return
    if control.state(job_id) is not None:
        message = f"was not evaluated: its process was killed; see {data.run(job_id).evaluation_log}"
        control.add_event(job_id, going.FAILED, message, "warning")


def is_on_cluster(job: Job) -> bool:
    """Return whether a scheduler runs a job on other machines, or True if this version lacks the job's backend."""
    return job.backend not in LAUNCH_BACKENDS or bool(LAUNCH_BACKENDS[job.backend].cluster)


def running_program(data: DataDir, control: Control, job: Job) -> ProcessRef | None:
    """Return the program of a command's current attempt if it is running, with or without a supervisor."""
    if not kind_of(job.config).is_program or is_on_cluster(job):
        return None
    recorded = [rank.process for rank in control.ranks(job.id) if rank.attempt == job.attempt]
    living = [process for process in recorded if process.is_alive()]
    return living[0] if living else find_program(data.run(job.id).root, job.attempt)


def mend(data: DataDir, control: Control, job: Job) -> bool:
    ending = read_ending(data.run(job.id).exit_file)
    if ending and ending.state.is_final:
        return control.transition(job.id, ending.state, **ending.fields())
    if running_program(data, control, job):
        # The queue process starts another supervisor, which attaches to the program.
        return False
    if _has_not_begun(data, job):
        return _queue_again(control, job)
    lock = data.run(job.id).lock_file
    held = is_held(lock)
    # Other users may have written the rows, so ignore the processes in them if no process holds the lock.
    living = [] if held is False else [rank for rank in control.ranks(job.id) if rank.process.is_alive()]
    backend = LAUNCH_BACKENDS.get(job.backend)
    # For a cluster job, do not wait for processes, which may run on this machine too, because the job is cancelled
    # below.
    if (living or (held and backend)) and not (backend and backend.cluster):
        _wait_or_kill(control, job, living, lock)
        return False
    if backend and backend.cancel:
        # The user may restart a lost job, so cancel the cluster job before marking the row as lost.
        pkgutil.resolve_name(backend.cancel)(data.run(job.id).attempt(job.attempt))
        if ended := read_ending(data.run(job.id).attempt(job.attempt) / "exit.json"):
            return _end(control, job, ended.state, "ended without its supervisor", "info", ended.fields())
    fields, has_finished = _final_progress(data, job)
    if has_finished:
        return _end(control, job, JobState.FINISHED, "its ranks finished without their supervisor", "info", fields)
    reason = _reason(data, job)
    return _end(control, job, JobState.LOST, reason, "error", fields | {"error": reason})


def _has_not_begun(data: DataDir, job: Job) -> bool:
    """Return whether a command's supervisor died after taking the GPUs but before starting the program."""
    paths = data.run(job.id)
    is_local_program = kind_of(job.config).is_program and not is_on_cluster(job)
    may_be_starting = job.state == JobState.STARTING and is_local_program and paths.job_file.exists()
    return may_be_starting and not paths.begun_file(job.attempt).exists()


def _queue_again(control: Control, job: Job) -> bool:
    """Put a job back in its place in the queue, unless it was asked to stop."""
    if control.open_requests(job.id) & {"stop", "kill"}:
        return _end(control, job, JobState.STOPPED, "stopped before its program was started", "info", {})
    fields: dict[str, Any] = {"attempt": max(0, job.attempt - 1), "started": None, "queued": job.queued}
    fields |= {"gpu_ids": (), "gpu_uuids": ()} if job.any_gpus else {}
    if not (control.transition(job.id, JobState.STOPPING) and control.transition(job.id, JobState.QUEUED, **fields)):
        return False
    message = "is queued again: its supervisor died before it had started the program"
    control.add_event(job.id, "queued-again", message, "warning")
    return True


def _end(control: Control, job: Job, state: JobState, message: str, level: str, fields: dict[str, Any]) -> bool:
    if not control.transition(job.id, state, **fields):
        return False
    control.add_event(job.id, str(state), message, level)
    return True


def _final_progress(data: DataDir, job: Job) -> tuple[dict[str, Any], bool]:
    """Return the columns written by the ranks after the supervisor had exited, and whether the job is complete."""
    run = LiveRun(data.run(job.id))
    run.poll()
    fields, heartbeat = run.fields(), run.heartbeat
    run.close()
    output = output_of(data, job)
    if output:
        fields["output_path"] = output
    # An extended job's heartbeat may be from before the extension, so use the total number of steps in the row.
    is_last = heartbeat is not None and heartbeat.is_complete(job.total_steps or 0)
    return fields, is_last and output is not None


def _wait_or_kill(control: Control, job: Job, living: list[Rank], lock: Path) -> None:
    """Give orphaned ranks one minute to save after the event reporting them, then kill them.

    The minute starts over if the clock is set back, and is not shortened if the clock jumps forward. Since other users
    may write rows too, kill only processes that hold the run's lock. If the lock holders are unknown, kill only
    processes that were started as ranks of the attempt.
    """
    clock_file = RunPaths(lock.parent).attempt(job.attempt) / "orphaned.json"
    events = [event for event in control.events(job.id) if event.kind in ("orphaned", "not-ended")]
    since = next((event.timestamp for event in reversed(events) if event.kind == "orphaned"), math.inf)
    if since > time.time():
        is_program = kind_of(job.config).is_program
        ranks = f"{plural(len(living), 'rank')} {'is' if len(living) == 1 else 'are'}"
        who = "a process of its run is" if not living else "its program is" if is_program else ranks
        does = "alive" if is_program else "alive and saving"
        message = f"its supervisor is gone; {who} still {does}"
        control.add_event(job.id, "orphaned", message, "warning")
        with contextlib.suppress(OSError):  # Without the file, clock jumps are not detected.
            write_json(clock_file, _wall_at_boot())
    elif time.time() - since - max(0.0, _wall_at_boot() - (read_json(clock_file, float) or math.inf)) > ORPHANS_S:
        ours = [rank for rank in living if _is_of_the_run(rank, lock)]
        for rank in ours:
            rank.process.send(signal.SIGKILL)
        if not ours and events[-1].kind == "orphaned":
            message = f"none of its recorded processes holds its run.lock; kill the process that `fuser {lock}` shows"
            control.add_event(job.id, "not-ended", message, "warning")


def _wall_at_boot() -> float:
    """Return the boot time according to the wall clock; it changes only if the clock jumps."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _is_of_the_run(rank: Rank, lock: Path) -> bool:
    """Return whether the rank's process holds the run's lock.

    If this cannot be determined, return whether the process was started as a rank of the attempt.
    """
    if is_held(lock) is not None:
        return is_holder(rank.process, lock)
    _, *expected = rank_command(RunPaths(lock.parent).rank_spec(rank.attempt))
    with contextlib.suppress(OSError):
        # A process's command line is empty while the process is starting and after it has exited.
        words = Path(f"/proc/{rank.process.pid}/cmdline").read_bytes().split(b"\0")
        return [os.fsdecode(word) for word in words[1:-1]] == expected
    return False


def _reason(data: DataDir, job: Job) -> str:
    if job.supervisor is None:
        return "its supervisor never started"
    if not is_of_this_boot(job.boot_id or ""):
        return "the machine was restarted"
    if not data.run(job.id).root.is_dir():
        return "its run folder was deleted"
    return f"its supervisor (pid {job.supervisor_pid}) disappeared"

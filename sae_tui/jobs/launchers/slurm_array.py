"""Submits the jobs of an array as one SLURM job array, whose tasks are the jobs.

The first supervisor of an array's jobs submits the tasks of all jobs that are ready and request the same resources. It
writes the task's id (such as `123_4`) to each job's run folder, where the job's own supervisor finds it. A task starts
its job's batch script; if the job's supervisor has not written the script yet, the task waits for it.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sae_tui.jobs.launchers.cluster import SlurmError, SlurmJob
from sae_tui.jobs.launchers.sbatch import ID_FILE, WAITS_S
from sae_tui.jobs.supervisor_log import note
from trainer.contract.errors import UserError
from trainer.contract.files import write_own
from trainer.contract.locks import FileLock
from trainer.contract.paths import RunPaths, private_folder, refuse_link, umask_of
from trainer.contract.settings.toml import table_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import ranges

BATCH_FILE = "job.sbatch"
# The largest index of a task; SLURM's default for MaxArraySize is 1001.
MOST_INDEX = 1000
# Only the first attempt of a job is submitted with its array; a later attempt is a SLURM job of its own.
_ATTEMPT = 1
_POLL_S = 0.1

_SCRIPT = """\
#!/bin/bash
# sae-tui array {array}
umask {umask:03o}
run={runs}/$(({base} + SLURM_ARRAY_TASK_ID))
exec >>"$run/logs/slurm.log" 2>&1
folder=$run/attempt{attempt}
task=${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID
for ((second = 0; second < {waits_s}; second++)); do
  # A network file system looks for new files when their folder is listed.
  ls "$folder" >/dev/null 2>&1
  if [ -e "$folder/{batch}" ] && [ "$(cat "$folder/{id_file}" 2>/dev/null)" = "$task" ]; then
    exec /bin/bash "$folder/{batch}"
  fi
  [ -e "$run/exit.json" ] && exit 0
  sleep 1
done
echo "the job's supervisor did not start within {waits_s} s" >&2
exit 1
"""

Submit = Callable[[Path, Sequence[str]], SlurmJob]


def submit_in_array(
    control_db: Path, job_id: int, paths: RunPaths, submit_alone: Callable[[], SlurmJob], submit: Submit
) -> SlurmJob:
    """Submit a job, together with the other jobs of its array that are ready, or find its submission by another job.

    `submit` submits a batch script with additional sbatch options, and `submit_alone` submits only this job.
    """
    control = Control(control_db)
    try:
        own = control.job(job_id)
        if own.array is None or own.attempt != _ATTEMPT:
            return submit_alone()
        lock, id_file = FileLock(control_db.parent / "locks" / f"slurm-array{own.array}.lock"), _id_file(paths)
        try:
            while not lock.acquire():
                time.sleep(_POLL_S)
        except UserError as error:
            note(f"its array is submitted as separate jobs: {error}")
            return submit_alone()
        try:
            if id_file.exists():
                return SlurmJob.read(id_file)
            members = _members(control, own, paths)
            if len(members) > 1:
                # If SLURM refuses the array, it may still accept the job, or give a reason without arrays.
                with contextlib.suppress(SlurmError):
                    return _submit(own, members, paths, submit)
            return submit_alone()
        finally:
            lock.release()
    finally:
        control.close()


def _members(control: Control, own: Job, paths: RunPaths) -> list[Job]:
    """Return the array's jobs that can be submitted together with this one, in order."""
    ready = [job for job in control.active_jobs() if job.array == own.array and _is_ready(job, own, paths)]
    ids = [job.id for job in ready]
    base = min(ids) if own.id - min(ids, default=own.id) <= MOST_INDEX else own.id
    return sorted((job for job in ready if 0 <= job.id - base <= MOST_INDEX), key=lambda job: job.id)


def _is_ready(job: Job, own: Job, paths: RunPaths) -> bool:
    """Return whether a job waits for its submission, and requests the same resources as this job."""
    if job.id == own.id:
        return True
    is_first = job.attempt == (0 if job.state == JobState.QUEUED else _ATTEMPT)
    waits = job.state in (JobState.QUEUED, JobState.STARTING) and is_first and not job.held and job.after == own.after
    is_here = job.host == own.host and job.user == own.user
    return waits and is_here and _resources(job) == _resources(own) and not _id_file(_sibling(paths, job)).exists()


def _resources(job: Job) -> tuple[Any, ...]:
    """Return everything that an sbatch command depends on, except for the job's name and files."""
    table = table_of(job.config)
    command: Mapping[str, Any] = table.get("command", {})
    return job.world_size, job.device, job.mode, table.get("kind"), table.get("launch"), command.get("grace_s")


def _submit(own: Job, members: Sequence[Job], paths: RunPaths, submit: Submit) -> SlurmJob:
    """Submit one task per job, record the tasks' ids, and return this job's task; cancel all tasks if that fails."""
    base = members[0].id
    script = paths.attempt(_ATTEMPT) / "array.sbatch"
    write_own(script, _script(own, base, paths))
    limit = f"%{own.array_limit}" if own.array_limit else ""
    indices = ranges([job.id - base for job in members]).replace(" ", "")
    whole = submit(script, [f"--array={indices}{limit}", f"--job-name=sae-tui-array{own.array}"])
    try:
        for job in members:
            folder = _sibling(paths, job).attempt(_ATTEMPT)
            private_folder(folder)
            refuse_link(folder)
            write_own(folder / ID_FILE, f"{whole.id}_{job.id - base}")
    except (OSError, UserError):
        whole.cancel()
        for job in members:
            with contextlib.suppress(OSError):
                _id_file(_sibling(paths, job)).unlink(missing_ok=True)
        raise
    return SlurmJob(f"{whole.id}_{own.id - base}")


def _script(own: Job, base: int, paths: RunPaths) -> str:
    return _SCRIPT.format(
        array=own.array,
        umask=umask_of(paths.root),
        runs=shlex.quote(str(paths.root.parent)),
        base=base,
        attempt=_ATTEMPT,
        batch=BATCH_FILE,
        id_file=ID_FILE,
        waits_s=WAITS_S,
    )


def _sibling(paths: RunPaths, job: Job) -> RunPaths:
    return RunPaths(paths.root.parent / str(job.id))


def _id_file(paths: RunPaths) -> Path:
    return paths.attempt(_ATTEMPT) / ID_FILE

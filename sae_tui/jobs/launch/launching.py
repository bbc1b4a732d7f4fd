"""Launches jobs: records them in the store, and makes sure that a queue process starts them."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from sae_tui.gpu import resolve
from sae_tui.jobs import detach, environment
from sae_tui.jobs.edits import as_tags
from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.limits import problems_with_policy, with_policy_limit
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.machine import this_machine
from sae_tui.jobs.named_python import whole
from sae_tui.jobs.queue.after import refuse_circle
from sae_tui.jobs.queue.promised import promised_by
from sae_tui.jobs.record import write_record
from sae_tui.jobs.store_access import open_control
from sae_tui.jobs.user import user_name
from sae_tui.policy import read_policy
from trainer.contract import progress
from trainer.contract.errors import JobFileError, UserError, errors, sentence
from trainer.contract.files import synced_together, write_own
from trainer.contract.paths import DataDir, working_folder
from trainer.contract.planning.check_job import Machine, MachineGpu, check
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.settings.consent import SBATCH, Code, Consent, problems_of, refused, sets
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import dump_job, to_table
from trainer.contract.settings.promised import Promises
from trainer.contract.store.database import LONGEST_TRANSACTION_S
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import join_words, ranges

Launched = TypeVar("Launched", bound=AnyJob)
Start = Callable[[DataDir, int], None]
# With this many launched jobs or more, an error message gives ranges of ids instead of naming each job.
MANY = 6


def launch(data: DataDir, job: AnyJob, placement: Placement, **options: Any) -> int:
    """Launch a job like `launch_all`, and return its id."""
    (job_id,) = launch_all(data, [(job, placement)], **options)
    return job_id


def launch_all(
    data: DataDir,
    jobs: Iterable[tuple[AnyJob, Placement]],
    *,
    gpu_source: str,
    after: Iterable[int] = (),
    hold: bool = False,
    tags: Iterable[str] = (),
    parent: int | None = None,
    as_array: bool = False,
    at_once: int | None = None,
    start: Start | None = None,
) -> list[int]:
    """Record jobs, make sure that a queue process is running, and return the jobs' ids without waiting for the jobs.

    The jobs start after the jobs in `after` have finished and, if `hold`, after they are released. With `as_array`,
    they form an array, of which at most `at_once` jobs run at a time.

    If any job cannot run, raise `JobFileError` and write nothing. If a job cannot be recorded, for example because the
    disk is full, raise a `UserError` that lists the jobs already launched, and create none of the others. If the queue
    process does not start, raise `NotStarted`; the jobs remain queued. In tests, `start` starts each job in place of
    the queue process.
    """
    after, tags = tuple(after), as_tags(tags)
    policy, promises = read_policy(data), promised_by(data, after)
    absolute = [(with_whole_python(job.with_paths([working_folder()])), placement) for job, placement in jobs]
    wanted = [(with_policy_limit(job, policy), placement) for job, placement in absolute]
    for job, placement in wanted:
        with environment.required(job):
            beyond = problems_with_policy(job, placement.gpus_wanted, policy, ())
            if problems := errors([*check(job, _machine_of(data, placement, promises)), *beyond]):
                raise JobFileError(problems)
    data.create()
    shared = {"user": user_name(), **this_machine(), "gpu_source": gpu_source, "held": hold}
    shared |= {"after": after, "tags": tags, "parent": parent, "array_limit": at_once}
    with open_control(data) as control:
        refuse_circle(control, 0, after)
        recording = _Recording(data, control, shared, as_array=as_array)
        return _record_and_start(recording, wanted, start)


def _record_and_start(
    recording: _Recording, jobs: Sequence[tuple[AnyJob, Placement]], start: Start | None
) -> list[int]:
    """Record the jobs in a few transactions, start each transaction's jobs once it is complete, and return all ids."""
    launched: list[int] = []
    left = jobs
    problem = ""
    # In the progress display, a job that is recorded but not started counts as half done.
    progress.stage("jobs", len(jobs))
    while left:
        try:
            recorded = recording.record(left)
        except UserError as error:
            raise _with_launched(error, launched) from None
        launched += recorded
        left = left[len(recorded) :]
        problem = _start(recording, recorded, start)
    if problem:
        raise NotStarted(launched, problem)
    return launched


def _start(recording: _Recording, job_ids: Sequence[int], start: Start | None) -> str:
    """Start recorded jobs, by default with the queue process; return why that does not start, or "" if it does."""
    for job_id in job_ids:
        if start:
            start_or_fail(recording.data, recording.control, job_id, start)
        progress.advance(0.5)
    return "" if start else enqueue(recording.data)


def _with_launched(error: UserError, launched: Sequence[int]) -> UserError:
    """Return the error with a list of the jobs launched before it, if there are any."""
    return UserError(f"{error}; already launched: {_named(launched)}" if launched else str(error))


def _named(job_ids: Sequence[int]) -> str:
    if len(job_ids) < MANY:
        return join_words([f"job {job_id}" for job_id in job_ids])
    return f"jobs {ranges(job_ids)}"


class NotStarted(UserError):
    """Raised if jobs are queued but no queue process could be started; `job_ids` contains their ids."""

    def __init__(self, job_ids: Sequence[int], reason: str) -> None:
        self.job_ids = list(job_ids)
        state = f"{_named(job_ids)} {'are' if len(job_ids) > 1 else 'is'} queued"
        super().__init__(f"{state}, but {reason}; the app and every sae-tui command try to start it again")


class _Recording:
    """Writes the rows and files of new jobs; `shared` contains the columns that all of the jobs have in common."""

    def __init__(self, data: DataDir, control: Control, shared: dict[str, Any], *, as_array: bool) -> None:
        self.data, self.control = data, control
        self._shared, self._as_array = shared, as_array
        # The id of the array's first job, once it is known.
        self._array: int | None = None
        self._past = control.jobs()

    def record(self, jobs: Iterable[tuple[AnyJob, Placement]]) -> list[int]:
        """Record jobs, in order, in one transaction until its time limit is reached; return the recorded jobs' ids.

        If one of them cannot be recorded, raise `UserError` and leave no rows or files of any of them.
        """
        ids: list[int] = []
        until = time.monotonic() + LONGEST_TRANSACTION_S
        with contextlib.ExitStack() as undo:
            with self.control.together(), self._explained(), synced_together():
                # A launch that was killed may have left folders, so choose ids above theirs.
                above = self.data.last_id()
                for job, placement in jobs:
                    ids.append(self._record(job, placement, above, undo))
                    progress.advance(0.5)
                    if time.monotonic() > until:
                        break
            undo.pop_all()
        return ids

    def _record(self, job: AnyJob, placement: Placement, above: int, undo: contextlib.ExitStack) -> int:
        with environment.judged_there(job):
            own = fields_of(self.data, job, placement, self._past)
        visible = visible_devices(placement, self._shared["gpu_source"])
        row = Job(name=job.name, visible_devices=visible, **self._shared, **own)

        def prepare(row: Job) -> Job:
            self.data.refuse_links(row.id)
            undo.callback(shutil.rmtree, self.data.run(row.id).root, ignore_errors=True)
            member, row = self._in_array(job, row)
            with self._explained():
                _write_files(self.data, row, member)
            return row

        return self.control.create_job(row, above=above, prepare=prepare)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert an `OSError` to a `UserError` about the data folder."""
        try:
            yield
        except OSError as error:
            raise UserError(f"the job cannot be recorded in {self.data.root}: {sentence(error)}") from None

    def _in_array(self, job: AnyJob, row: Job) -> tuple[AnyJob, Job]:
        """Return the job and its row with the array's id, which is the id of the array's first job."""
        if not self._as_array:
            return job, row
        self._array = self._array or row.id
        member = launch_kind(job.kind).in_array(job, self._array)
        return member, msgspec.structs.replace(row, array=self._array, config=dump_job(member))


def enqueue(data: DataDir) -> str:
    """Make sure that a queue process is running to start the queued jobs; return why it cannot be started, or ""."""
    try:
        detach.start_queue(data)
    except (UserError, OSError) as error:
        return sentence(error)
    return ""


def with_whole_python(job: Launched, otherwise: str = "") -> Launched:
    """Expand `~` in the path to a job's interpreter; if the job does not name an interpreter, use `otherwise`."""
    python = otherwise if job.launch.python is None else job.launch.python
    if not (python and job.needs_trainer):
        return job
    return job.replace("launch", python=whole(python))


def write_files(data: DataDir, control: Control, job_id: int, job: AnyJob) -> None:
    """Write the files needed by a queued job's supervisor; if this fails, mark the job failed and raise `UserError`."""

    def write(data: DataDir, job_id: int) -> None:
        data.refuse_links(job_id)
        _write_files(data, control.job(job_id), job)

    start_or_fail(data, control, job_id, write)


def _write_files(data: DataDir, row: Job, job: AnyJob) -> None:
    paths = data.run(row.id)
    paths.create()
    write_own(paths.job_file, dump_job(job))
    launch_kind(job.kind).write_files(data, row, job)
    write_record(paths, row)


def start_or_fail(data: DataDir, control: Control, job_id: int, start: Start) -> None:
    """Start a job; if that fails, record the reason in the job's row and raise `UserError`."""
    try:
        start(data, job_id)
    except (UserError, OSError) as error:
        reason = sentence(error)
        control.transition(job_id, JobState.FAILED, error=reason)
        raise UserError(f"job {job_id} could not be started: {reason}") from None


def refuse_options_of_others(distrust: str, job: AnyJob, overrides: Sequence[str] = ()) -> None:
    """Raise `JobFileError` if an untrusted job file sets sbatch options or settings that run code.

    `distrust` explains why the file is not trusted, for example because other users can write to it; for a trusted
    file, it is "".
    """
    # Check local jobs too: the options are copied into our own job file, and a later resume may use SLURM.
    table = to_table(job)
    refusals = refused(table, Consent(overrides=tuple(overrides)))
    if job.launch.sbatch_options and not sets(overrides, SBATCH):
        refusals.append(Code(SBATCH, "", ""))
    if distrust and refusals:
        raise JobFileError(problems_of(refusals, distrust))


def fields_of(data: DataDir, job: AnyJob, placement: Placement, past: Iterable[Job]) -> dict[str, Any]:
    """Return the job row columns determined by the job's settings and placement."""
    return launch_kind(job.kind).row(data, job, placement, past) | {
        "config": dump_job(job),
        "device": placement.device,
        "gpu_ids": tuple(index for index, _ in placement.gpus),
        "gpu_uuids": tuple(uuid for _, uuid in placement.gpus),
        "gpus_wanted": placement.gpus_wanted,
        "any_gpus": placement.any_gpus,
        "shares_gpus": job.launch.share,
        "distributed": placement.world_size > 1,
        "world_size": placement.world_size,
        "priority": job.launch.priority,
        "max_restarts": job.launch.max_restarts,
        "backend": job.launch.backend,
    }


def visible_devices(placement: Placement, gpu_source: str) -> str | None:
    """Return the value of the environment variable that limits the visible GPUs, such as `CUDA_VISIBLE_DEVICES`.

    Return None if the variable is not set, or if the job does not use GPUs.
    """
    vendor = VENDORS.get(placement.vendor or resolve(gpu_source))
    wants_gpus = placement.device == "cuda" or placement.gpus_wanted
    return vendor.visible_devices() if vendor and wants_gpus else None


def _machine_of(data: DataDir, placement: Placement, promises: Promises) -> Machine:
    """Return a `Machine` that has only the job's GPUs, for the job checks.

    The GPUs themselves were checked when the job was placed.
    """
    indices = range(placement.world_size) if placement.any_gpus else [index for index, _ in placement.gpus]
    gpus = tuple(MachineGpu(index, f"GPU {index}", None) for index in indices)
    return Machine(gpus, os.cpu_count() or 1, data.root, promises=promises)

"""Turns a running process into a job, so that the queue, the history and the alerts include it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.proc_files import arguments_of
from sae_tui.jobs import detach
from sae_tui.jobs.edits import LONGEST_NAME, as_tags
from sae_tui.jobs.launch.kinds.command import name_of_command
from sae_tui.jobs.launch.launching import Start, enqueue, fields_of, start_or_fail
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.launchers.attached import ADOPTED
from sae_tui.jobs.launchers.process_tree import MARK, ProcessTree, environ_of, is_detached
from sae_tui.jobs.machine import this_machine
from sae_tui.jobs.program_environment import snapshot
from sae_tui.jobs.record import write_record
from sae_tui.jobs.store_access import open_control
from sae_tui.jobs.user import user_name
from trainer.contract.errors import UserError, sentence
from trainer.contract.files import write_own
from trainer.contract.paths import DataDir
from trainer.contract.printable import is_utf8, printable
from trainer.contract.process import ProcessRef
from trainer.contract.settings.command import Command, CommandJob
from trainer.contract.settings.job import Launch
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.job_store import Control, LeaseConflict
from trainer.contract.store.rows import Job, Rank
from trainer.contract.store.states import JobState


def adopt(
    data: DataDir,
    pid: int,
    samples: Iterable[GpuSample],
    *,
    gpu_source: str,
    name: str = "",
    tags: Iterable[str] = (),
    start: Start = detach.start,
) -> int:
    """Record one of this user's running processes as a job with the GPUs that it uses, and return the job's id.

    The process is not affected. Raise `UserError` if there is no such process, or if it belongs to another user or to
    a job.
    """
    process = _own_process(pid)
    pids = {ref.pid for ref in ProcessTree(pid, data.root).living()}
    gpus = tuple(
        (sample.index, sample.uuid) for sample in samples if pids & {one.pid for one in sample.processes or ()}
    )
    job = _job(pid, name, [index for index, _ in gpus])
    placement = Placement("cuda" if gpus else "cpu", gpus, max(1, len(gpus)))
    data.create()
    with open_control(data) as control:
        _refuse_if_of_job(control, process, data)
        row = Job(
            name=job.name,
            user=user_name(),
            **this_machine(),
            gpu_source=gpu_source,
            # Until the process is recorded, the queue must not start the command a second time.
            held=True,
            tags=as_tags(tags),
            **fields_of(data, job, placement, ()) | {"mode": ADOPTED},
        )
        job_id = control.create_job(row, above=data.last_id(), prepare=lambda row: _prepare(data, row, job, pid))
        _lease(control, control.job(job_id), process)
        start_or_fail(data, control, job_id, start)
        enqueue(data)  # if it fails, the next command tries again
    return job_id


def _own_process(pid: int) -> ProcessRef:
    process = ProcessRef.of(pid)
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        process = None
    if process is None:
        raise UserError(f"there is no process {pid} on this machine; `sae-tui gpus` shows the processes on the GPUs")
    if owner != os.geteuid():
        raise UserError(f"process {pid} belongs to another user; adopt one of your own")
    if pid == os.getpid() or is_detached(pid):
        raise UserError(f"process {pid} belongs to sae-tui itself; adopt another program")
    return process


def _refuse_if_of_job(control: Control, process: ProcessRef, data: DataDir) -> None:
    runs = os.fsencode(f"{MARK}={data.root}/")
    marked = next((entry for entry in environ_of(process.pid) if entry.startswith(runs)), b"")
    for job in control.active_jobs():
        ranks = [rank.process for rank in control.ranks(job.id)]
        if process in ranks or marked == os.fsencode(f"{MARK}={data.run(job.id).root}"):
            raise UserError(f"process {process.pid} already belongs to job {job.id}")


def _job(pid: int, name: str, gpus: list[int]) -> CommandJob:
    """Return a job with a process's command line and working directory."""
    argv = [word if is_utf8(word) else printable(word) for word in arguments_of(pid)]
    if not (argv and argv[0]):  # a program may overwrite its arguments
        argv = [f"process {pid}", *argv[1:]]
    try:
        folder = os.readlink(f"/proc/{pid}/cwd")
    except OSError as error:
        raise UserError(f"the folder of process {pid} cannot be read: {sentence(error)}") from None
    launch = Launch(gpus=gpus or "cpu")
    command = Command(argv=argv, folder=folder if is_utf8(folder) else "/")
    return CommandJob(command=command, launch=launch, name=printable(name)[:LONGEST_NAME] or name_of_command(argv))


def _prepare(data: DataDir, row: Job, job: CommandJob, pid: int) -> Job:
    paths = data.run(row.id)
    try:
        paths.create()
        write_own(paths.job_file, dump_job(job))
        entries = (entry.partition(b"=") for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        snapshot({name: value for name, equals, value in entries if equals}).write(paths)
        write_record(paths, row)
    except OSError as error:
        raise UserError(f"process {pid} cannot be recorded in {data.root}: {sentence(error)}") from None
    return row


def _lease(control: Control, job: Job, process: ProcessRef) -> None:
    """Record a process and lease its GPUs; if another job has leased one of them, record the process without leases."""
    fields: dict[str, Any] = {"attempt": 1, "started": time.time() - process.age_s, "held": False}
    rank = Rank(
        job_id=job.id, attempt=1, rank=0, pid=process.pid, start_ticks=process.start_ticks, boot_id=process.boot_id
    )
    control.record_rank(rank)
    try:
        control.lease(job, list(zip(job.gpu_ids, job.gpu_uuids, strict=True)), **fields)
    except LeaseConflict as conflict:
        control.transition(job.id, JobState.STARTING, **fields)
        control.add_event(job.id, "not-leased", f"{conflict}, so this job has not leased its GPUs", "warning")
    control.add_event(job.id, "adopted", f"process {process.pid} of {job.user} was adopted as this job")

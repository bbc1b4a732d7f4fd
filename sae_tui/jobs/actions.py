"""What app and command line do with jobs: check, launch, stop, kill."""

from __future__ import annotations

import getpass
import os
import socket
from pathlib import Path

from sae_tui.jobs.files import write_whole
from sae_tui.jobs.launchers import Launcher, launcher
from sae_tui.jobs.placement import Placement
from trainer.contract import memory
from trainer.contract.config import dump_job, with_data_path
from trainer.contract.control import Control, Job
from trainer.contract.job import JobConfig
from trainer.contract.paths import DataDir
from trainer.contract.problems import JobFileError, Problem, UserError, errors
from trainer.contract.states import JobState
from trainer.contract.validate import Machine, MachineGpu, check


def validate(job: JobConfig, machine: Machine) -> list[Problem]:
    """Every problem of the job on this machine, errors and warnings."""
    return check(job, machine)


def launch(
    data: DataDir, job: JobConfig, placement: Placement, *, gpu_source: str, start: Launcher | None = None
) -> int:
    """Records the job, starts its supervisor and returns its id at once.

    Raises `JobFileError` where the job cannot run, before anything is written, and `UserError` where
    the supervisor does not start; the job is then `failed` with that reason. `start` stands in for
    the launcher that `launch.backend` names.
    """
    job = with_data_path(job, [Path.cwd()])
    found = errors(validate(job, _machine_of(data, placement)))
    if found:
        raise JobFileError(found)
    data.create()
    control = Control(data.control_db)
    try:
        job_id = control.create_job(_row(job, placement, gpu_source))
        _start(data, control, job_id, job, start or launcher(job.launch.backend))
        return job_id
    finally:
        control.close()


def stop(data: DataDir, job_id: int) -> str:
    """Asks a job to save and end; returns what happens now, in words."""
    return _ask(
        data,
        job_id,
        "stop",
        queued=f"job {job_id} had not started yet; it ends at once",
        running=f"job {job_id} saves a checkpoint and stops at its next step",
    )


def kill(data: DataDir, job_id: int) -> str:
    """Has a job's supervisor end its ranks: SIGTERM, and SIGKILL 5 s later."""
    return _ask(
        data,
        job_id,
        "kill",
        queued=f"job {job_id} had not started yet; it ends at once",
        running=f"job {job_id} is ended within 5 s, saved or not",
    )


def _start(data: DataDir, control: Control, job_id: int, job: JobConfig, start: Launcher) -> None:
    paths = data.run(job_id)
    try:
        paths.create()
        write_whole(paths.job_file, dump_job(job).encode())
        start(data, job_id)
    except (UserError, OSError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        control.transition(job_id, JobState.FAILED, error=reason)
        raise UserError(f"job {job_id} could not be started: {reason}") from None


def _machine_of(data: DataDir, placement: Placement) -> Machine:
    """The checks of the devices were made when the job was placed: its GPUs are the machine here."""
    gpus = tuple(MachineGpu(index, f"GPU {index}", None) for index, _ in placement.gpus)
    return Machine(gpus, os.cpu_count() or 1, data.root)


def _row(job: JobConfig, placement: Placement, gpu_source: str) -> Job:
    shape, device = job.data_shape(), placement.device
    estimated = memory.estimate(job, shape.d_in, placement.world_size, d_out=shape.d_out, device=device)
    return Job(
        name=job.name,
        config=dump_job(job),
        user=_user(),
        host=socket.gethostname(),
        device=device,
        gpu_source=gpu_source,
        gpu_ids=tuple(index for index, _ in placement.gpus),
        gpu_uuids=tuple(uuid for _, uuid in placement.gpus),
        distributed=placement.world_size > 1,
        world_size=placement.world_size,
        mode=job.mode(placement.world_size),
        total_steps=job.total_steps(placement.world_size),
        d_in=shape.d_in,
        d_out=shape.d_out,
        estimated_memory_bytes=estimated.total,
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's uid without a name
        return f"uid {os.getuid()}"


def _ask(data: DataDir, job_id: int, kind: str, *, queued: str, running: str) -> str:
    if not data.control_db.exists():
        raise UserError(f"there is no job {job_id}; `sae-tui jobs` lists them")
    control = Control(data.control_db)
    try:
        job = control.job(job_id)
        if job.state.is_final:
            return f"job {job_id} is already {job.state}"
        control.request(job_id, "kill" if kind == "kill" else "stop")
        return queued if job.state == JobState.QUEUED else running
    finally:
        control.close()

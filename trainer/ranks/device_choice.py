"""Chooses devices on this machine for a job, and checks whether the job can run on those devices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.contract.errors import JobFileError, UsageError, errors
from trainer.contract.output import complain
from trainer.contract.paths import box_file
from trainer.contract.planning.check_job import Machine, check, chosen_indices, takes_slices, wanted_devices
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.gpu_vendors import is_slice, refusal_of_slices
from trainer.contract.planning.hardware import CPU, read_box, slowest
from trainer.contract.printable import printable
from trainer.contract.runs.model_gpus import with_model_placed
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.job import AnyJob, J, JobConfig
from trainer.contract.store.rows import Device as DeviceType
from trainer.ranks.devices import Device, torch_vendor, visible_gpus


def here(job: J) -> J:
    """Return a copy of the job that runs on this machine, even if the job requests a cluster."""
    return job.replace("launch", backend="local", nodes=1) if job.cluster else job


def refuse_bad(job: JobConfig, gpus: list[Device], run_dir: Path, only: str | tuple[str, ...] = "") -> None:
    """Raise `JobFileError` with all errors that prevent the job from running; print the other problems as warnings.

    Check only settings whose path starts with `only`.
    """
    machine = Machine(tuple(gpu.as_machine_gpu for gpu in gpus), len(os.sched_getaffinity(0)), run_dir)
    problems = [problem for problem in check(job, machine) if problem.path.startswith(only)]
    if fatal := errors(problems):
        raise JobFileError(fatal)
    for problem in problems:
        complain(f"warning: {printable(str(problem))}\n")


def chosen(job: AnyJob, gpus: list[Device]) -> list[Device]:
    """Return the GPUs to run on, or [] for the CPU ("auto" selects the CPU on a machine without GPUs)."""
    by_index, count = {gpu.index: gpu for gpu in gpus}, wanted_devices(job)
    any_will_do = [gpu.index for gpu in gpus if takes_slices(job, count) or not is_slice(gpu.uuid)]
    indices = chosen_indices(job) or any_will_do[:count]
    return [by_index[index] for index in indices] if gpus else []


def with_places(spec: RankSpec, job: JobConfig, gpus: Sequence[Device]) -> RankSpec:
    """Return the spec with GPUs reserved for the language model, if the plan for these GPUs (or for the CPU) needs any.

    GPU memory that other processes use is not considered.
    """
    name = slowest(gpu.name for gpu in gpus) if gpus else CPU
    capacity = DeviceMemory(total_bytes=min((gpu.memory_bytes for gpu in gpus), default=None))
    return with_model_placed(spec, job, name, read_box(box_file()), capacity)


def devices_again(
    job: JobConfig, last: RankSpec, overrides: Sequence[str]
) -> tuple[int, DeviceType, list[Device], str]:
    """Return the number of devices, the device type ("cuda" or "cpu"), the GPUs and their vendor for a resumed run.

    Use the devices from the last attempt, unless `overrides` set launch.gpus or one of these GPUs is gone.
    """
    job = here(job)
    asked = any(override.partition("=")[0].strip() == "launch.gpus" for override in overrides)
    if not asked and last.device == "cpu":
        job = job.replace("launch", gpus=f"cpu:{last.n_devices}")
    gpus = [] if job.on_cpu else visible_gpus()
    if not asked and last.gpu_uuids:
        again = [gpu.index for gpu in gpus if gpu.uuid in last.gpu_uuids]
        job = job.replace("launch", gpus=again if len(again) == last.n_devices else f"auto:{last.n_devices}")
    refuse_bad(job, gpus, last.run_dir)
    taken = chosen(job, gpus)
    return len(taken) or wanted_devices(job), "cuda" if taken else "cpu", taken, torch_vendor() if taken else ""


def parse_target(asked: str) -> tuple[int, tuple[str, ...]]:
    """Return the number of ranks and the UUIDs of their GPUs, or no UUIDs for CPU processes.

    `asked` has the same format as launch.gpus: "auto:2", "cpu:2" or "0,1". Raise `UsageError` if `asked` is invalid or
    names a missing GPU.
    """
    word, _, count = asked.partition(":")
    gpus = [] if word == "cpu" else visible_gpus()
    if word == "cpu" or not gpus:
        if word not in ("auto", "cpu") or (count and not count.isdecimal()):
            raise UsageError(f'--gpus: there is no GPU here for "{asked}"; use cpu or cpu:2')
        return int(count or 1), ()
    uuids = {str(gpu.index): gpu.uuid for gpu in gpus}
    wanted = _any_of(uuids, int(count) if count.isdecimal() else None) if word == "auto" else asked.split(",")
    if unknown := [index for index in wanted if index not in uuids]:
        raise UsageError(f"--gpus: there is no GPU {unknown[0]} here; this machine has {', '.join(uuids)}")
    if refusal := refusal_of_slices([(int(index), is_slice(uuids[index])) for index in wanted]):
        raise UsageError(f"--gpus: {refusal}")
    return len(wanted), tuple(uuids[index] for index in wanted)


def _any_of(uuids: Mapping[str, str], count: int | None) -> list[str]:
    """Return the indices of the first `count` GPUs that are not MIG slices, or of all such GPUs if `count` is None.

    If `count` is 1, or all GPUs are slices, return the first GPU or slice.
    """
    whole = [index for index, uuid in uuids.items() if not is_slice(uuid)]
    return (whole or list(uuids)[:1])[:count] if count != 1 else list(uuids)[:1]

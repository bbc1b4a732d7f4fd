"""Decides where a job runs: recommends GPUs, and resolves `launch.gpus` on this machine."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.gpus.availability import GpuChoice, fit
from sae_tui.jobs.launch.memory_need import memory_of_host, of_same_shape, outlook_here
from sae_tui.jobs.launch.pytorch import cuda_problem, for_another_vendor
from trainer.contract.errors import JobFileError, Problem, errors
from trainer.contract.paths import DataDir
from trainer.contract.planning.check_job import (
    AnyOutlook,
    Machine,
    MachineGpu,
    exchanges,
    memory_problems,
    takes_slices,
    wanted_devices,
)
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.gpu_vendors import VENDORS, is_slice, refusal_of_mixture, refusal_of_slices
from trainer.contract.planning.hardware import MeasuredHardware, read_box
from trainer.contract.planning.outlook import NOTHING_MEASURED, Outlook
from trainer.contract.planning.torch_build import installed_build, vendor_of_build
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import AnyJob, members
from trainer.contract.settings.promised import NO_PROMISES, Promises
from trainer.contract.store.rows import Device, Job
from trainer.contract.wording import duration, gibibytes, join_words, plural

# The most SAEs of a sweep that a summary names.
MOST_SHOWN = 6


class Recommendation(msgspec.Struct, frozen=True):
    """The recommended GPUs, best first, a reason for each GPU, and why there are fewer than requested."""

    gpus: tuple[int, ...]
    memory_required: int
    reasons: dict[int, str]
    shortfall: str = ""


class Placement(msgspec.Struct, frozen=True):
    """The devices of a job, `world_size` of them. On simulated GPUs the device is the CPU, but the GPUs are leased.

    With `any_gpus` the job takes the first `world_size` GPUs that become free. For a job on a cluster `gpus` is empty.
    """

    device: Device
    gpus: tuple[tuple[int, str], ...]
    world_size: int
    any_gpus: bool = False
    # The job's outlook on these devices. A job resumed in its old place has none, only the memory that it needed on
    # each GPU before (`had_bytes`).
    look: AnyOutlook | None = None
    had_bytes: int | None = None
    # The vendor of the GPUs; "" if it is unknown.
    vendor: str = ""

    @property
    def gpus_wanted(self) -> int:
        return self.world_size if self.any_gpus else len(self.gpus)


def recommend(choices: Iterable[GpuChoice], needed_bytes: int, count: int) -> Recommendation:
    """Recommend up to `count` GPUs of one vendor that are free, readable and large enough, most free memory first."""
    reasons, usable = {}, []
    for choice in choices:
        alone = "a MIG slice, which runs a job alone" if count > 1 and is_slice(choice.uuid) else ""
        obstacle = alone or _obstacle(choice, needed_bytes)
        reasons[choice.index] = obstacle or f"{gibibytes(choice.memory_free_bytes or 0)} free"
        if not obstacle:
            usable.append(choice)
    usable.sort(key=lambda choice: (-(choice.memory_free_bytes or 0), choice.index))
    gpus = tuple(choice.index for choice in _of_one_vendor(usable, count)[:count])
    return Recommendation(gpus, needed_bytes, reasons, _shortfall(gpus, reasons, count))


def _of_one_vendor(choices: Sequence[GpuChoice], count: int) -> Sequence[GpuChoice]:
    """Return the GPUs of the vendor that PyTorch is built for, or else of the vendor with the most of `count` GPUs."""
    by_vendor: dict[str, list[GpuChoice]] = {}
    for choice in choices:
        by_vendor.setdefault(choice.vendor, []).append(choice)
    if len(by_vendor) < 2:
        return choices
    suited = vendor_of_build(list(by_vendor))
    build = installed_build()
    is_known = build is not None and build.runtime == VENDORS[suited].torch_runtime
    return by_vendor[suited] if is_known else max(by_vendor.values(), key=lambda own: min(len(own), count))


def place(
    job: AnyJob,
    choices: Sequence[GpuChoice],
    *,
    source_cuda: bool,
    multi_gpu_enabled: bool = True,
    speeds: MeasuredHardware = NOTHING_MEASURED,
    past: Iterable[Job] = (),
    promises: Promises = NO_PROMISES,
) -> Placement:
    """Resolve `launch.gpus` on this machine; raise `JobFileError` naming a request that can never be met."""
    placement = _resolve(job, choices, source_cuda, multi_gpu_enabled)
    look = outlook_here(job, _machine(choices, source_cuda, speeds, promises), past)
    if fatal := errors(memory_problems(look, job)):
        raise JobFileError(fatal)
    return msgspec.structs.replace(placement, look=look)


def _resolve(job: AnyJob, choices: Sequence[GpuChoice], source_cuda: bool, multi_gpu_enabled: bool) -> Placement:
    gpus = job.launch.gpus
    count = wanted_devices(job)
    if job.cluster:
        return Placement("cpu" if job.on_cpu else "cuda", (), count)
    if job.on_cpu or (gpus == "auto" and not choices):
        return Placement("cpu", (), count)
    if count > 1 and not multi_gpu_enabled:
        raise _refusal(f"asks for {count} GPUs, but multi_gpu_enabled is false in the settings; name one GPU")
    any_gpus = not isinstance(gpus, list)
    if any_gpus:
        _refuse_too_many(choices, job)
    chosen = _find_gpus(gpus, choices) if isinstance(gpus, list) else []
    if exchanges(job) and (refusal := refusal_of_slices([(gpu.index, is_slice(gpu.uuid)) for gpu in chosen])):
        raise _refusal(refusal)
    vendor = _one_vendor([one for one in choices if one.state != "unhealthy"] if any_gpus else chosen)
    if vendor and (build := installed_build()) and build.runtime not in ("", VENDORS[vendor].torch_runtime):
        raise _refusal(f"PyTorch {for_another_vendor(*build, VENDORS[vendor])}")
    is_cuda = VENDORS[vendor].device == "cuda" if vendor else source_cuda
    device: Device = "cuda" if is_cuda else "cpu"
    return Placement(device, tuple((gpu.index, gpu.uuid) for gpu in chosen), count, any_gpus=any_gpus, vendor=vendor)


def _one_vendor(choices: Sequence[GpuChoice]) -> str:
    """Return the vendor of all these GPUs, "" if it is unknown; raise `JobFileError` if there are several."""
    if message := refusal_of_mixture((choice.index, choice.vendor) for choice in choices):
        raise _refusal(message)
    return next((choice.vendor for choice in choices), "")


def machine(
    choices: Sequence[GpuChoice],
    data: DataDir,
    *,
    cuda: bool,
    host: DeviceMemory | None = None,
    promises: Promises = NO_PROMISES,
) -> Machine:
    """Return this machine as input for the checks of a job; `cuda` says whether jobs can use CUDA on its GPUs."""
    return msgspec.structs.replace(
        _machine(choices, cuda, read_box(data.box_file), promises),
        output_root=data.root,
        memory=host or memory_of_host(),
        cuda_problem=cuda_problem({one.vendor for one in choices if one.vendor}) if cuda and choices else "",
    )


def _machine(choices: Iterable[GpuChoice], cuda: bool, speeds: MeasuredHardware, promises: Promises) -> Machine:
    gpus = tuple(
        MachineGpu(
            index=choice.index,
            name=choice.name,
            memory_free_bytes=choice.memory_free_bytes,
            busy=choice.reason if choice.state == "busy" else "",
            unhealthy=choice.reason if choice.state == "unhealthy" else "",
            memory_total_bytes=choice.memory_usable_bytes or choice.memory_total_bytes,
            vendor=choice.vendor,
            is_slice=is_slice(choice.uuid),
        )
        for choice in choices
    )
    return Machine(gpus, os.cpu_count() or 1, Path(), memory_of_host(), speeds, cuda, promises=promises)


def summary(job: JobConfig, look: Outlook, *, device: str = "cuda", past: Iterable[Job] = ()) -> str:
    """Return `2 GPUs, ddp · effective batch 8192 = 4096 × 2 · needs 3.1 GiB per GPU · about 12 min`.

    A sweep is listed first. The time is measured in a finished job on the same type of device, or else estimated.
    """
    devices, work = look.devices, look.settled.work
    where = plural(devices, "GPU" if look.on_gpus else "CPU process")
    batch, factors = str(work.tokens_per_step), _factors(work)
    if len(factors) > 1:
        batch += " = " + " × ".join(map(str, factors))
    each = f" per {'GPU' if look.on_gpus else 'process'}" if devices > 1 else ""
    seconds, measured = expected_seconds(job, look, device, past)
    parts = [
        *([_sweep(job)] if job.sweep else []),
        f"{where}, {look.mode}",
        f"effective batch {batch}",
        f"needs {gibibytes(look.needs_bytes)}{each}",
        f"about {duration(seconds)}" + ("" if measured else ", estimated"),
        *([look.placed.sentence] if look.placed and (look.placed.model_gpus or look.placed.why) else []),
    ]
    return " · ".join(parts)


def expected_seconds(job: JobConfig, look: Outlook, device: str, past: Iterable[Job]) -> tuple[float, bool]:
    """Return the seconds that the steps of a job take, and whether they were measured in a finished job of its shape.

    Otherwise they are estimated.
    """
    work = look.settled.work
    alike = of_same_shape(job, work.shape, look.devices, look.mode, device, past)
    if rate := next((done.tokens_per_s for done in alike if done.tokens_per_s), None):
        return work.total_tokens / rate, True
    return max(1.0, work.total_steps * look.settled.time.total_s), False


def _factors(work: Workload) -> list[int]:
    """Return the factors of an effective batch except 1: tokens, micro-batches, data-parallel ranks.

    Return [] if their product is not the batch.
    """
    factors = (work.micro_batch, work.micro_batches, work.data_ranks)
    return [factor for factor in factors if factor != 1] if math.prod(factors) == work.tokens_per_step else []


def _sweep(job: JobConfig) -> str:
    """Return `3 SAEs: k=16, k=32, k=64`; of more than 6 SAEs only the first 5."""
    labels = [label.replace(",", " ") for label in members(job)]
    shown = labels if len(labels) <= MOST_SHOWN else [*labels[: MOST_SHOWN - 1], "…"]
    return f"{plural(len(labels), 'SAE')}: {', '.join(shown)}"


def _obstacle(choice: GpuChoice, needed_bytes: int) -> str:
    return choice.reason if choice.state != "available" else fit(choice, needed_bytes)


def _shortfall(gpus: Sequence[int], reasons: dict[int, str], count: int) -> str:
    if len(gpus) == count:
        return ""
    if not reasons:
        return 'this machine has no GPUs; choose "cpu" to run the job on the CPU'
    others = [f"GPU {index}: {reason}" for index, reason in reasons.items() if index not in gpus]
    available = f"only {len(gpus)} of {count} GPUs {'is' if len(gpus) == 1 else 'are'}" if gpus else "no GPU is"
    return f"{available} available ({'; '.join(others) or f'this machine has {len(reasons)}'})"


def _find_gpus(indices: Sequence[int], choices: Sequence[GpuChoice]) -> list[GpuChoice]:
    """Return the GPUs with these indices, including busy GPUs: the job waits for them, or shares them if it may."""
    gpu_by_index = {choice.index: choice for choice in choices}
    missing = [index for index in indices if index not in gpu_by_index]
    if missing:
        here = join_words([f"GPU {index}" for index in gpu_by_index]) if gpu_by_index else "no GPUs"
        raise _refusal(f"there is no GPU {missing[0]} here; this machine has {here}")
    for index in indices:
        if gpu_by_index[index].state == "unhealthy":
            raise _refusal(f"GPU {index} cannot be used: {gpu_by_index[index].reason}; choose another")
    return [gpu_by_index[index] for index in indices]


def _refuse_too_many(choices: Sequence[GpuChoice], job: AnyJob) -> None:
    """Raise `JobFileError` if too few GPUs are usable; busy GPUs count, since the job waits for them."""
    count = wanted_devices(job)
    if not choices:
        raise _refusal(f'asks for {plural(count, "GPU")}, but this machine has none; use "cpu:{count}"')
    suited = [choice for choice in choices if takes_slices(job) or not is_slice(choice.uuid)]
    usable = [choice for choice in suited if choice.state != "unhealthy"]
    if len(usable) < count:
        alone = "" if len(suited) == len(choices) else "; a MIG slice runs a job alone"
        here = f"only {len(usable)} of {len(choices)} can be used here"
        raise _refusal(f"asks for {plural(count, 'GPU')}, but {here}{alone}")
    unknown = [choice.index for choice in usable if choice.memory_free_bytes is None]
    if len(usable) - len(unknown) < count:
        named = join_words([f"GPU {index}" for index in unknown])
        raise _refusal(
            f"asks for any {plural(count, 'GPU')}, but the free memory of {named} is unknown; name the GPUs to use, "
            f"as in launch.gpus = [{unknown[0]}]"
        )


def _refusal(message: str) -> JobFileError:
    return JobFileError([Problem("launch.gpus", message)])

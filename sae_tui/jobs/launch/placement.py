"""Decides where a job runs: recommends GPUs, and resolves `launch.gpus` on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from sae_tui.jobs.gpus.availability import GpuChoice, fit
from sae_tui.jobs.launch.memory_need import memory_of_host, used_before
from sae_tui.jobs.launch.pytorch import cuda_problem, for_another_vendor
from trainer.contract.errors import JobFileError, Problem, errors
from trainer.contract.paths import DataDir
from trainer.contract.planning.check_job import Machine, MachineGpu, Proposal, propose
from trainer.contract.planning.gpu_vendors import VENDORS, is_slice, refusal_of_mixture, refusal_of_slices
from trainer.contract.planning.hardware import read_box
from trainer.contract.planning.outlook import AnyOutlook
from trainer.contract.planning.torch_build import installed_build, vendor_of_build
from trainer.contract.settings.job import J
from trainer.contract.settings.promised import NO_PROMISES, Promises
from trainer.contract.store.rows import Device, Job
from trainer.contract.wording import gibibytes, join_words, plural


class Recommendation(msgspec.Struct, frozen=True):
    """The recommended GPUs, best first.

    `reasons` maps each GPU to the reason for or against it. `shortfall` explains why there are fewer GPUs than
    requested.
    """

    gpus: tuple[int, ...]
    memory_required: int
    reasons: dict[int, str]
    shortfall: str = ""


class Placement(msgspec.Struct, frozen=True):
    """A job's devices; `world_size` is the number of devices.

    If `any_gpus`, the job uses the first `world_size` GPUs that become free. For a job on a cluster, `gpus` is empty.
    A job on simulated GPUs leases these GPUs, but runs on the CPU.
    """

    device: Device
    gpus: tuple[tuple[int, str], ...]
    world_size: int
    any_gpus: bool = False
    # The job's outlook on these devices, or None if a job is resumed on its former devices.
    look: AnyOutlook | None = None
    # The memory that the job previously needed on each GPU, if it is resumed on its former devices.
    had_bytes: int | None = None
    # The GPUs' vendor, or "" if it is unknown.
    vendor: str = ""

    @property
    def gpus_wanted(self) -> int:
        return self.world_size if self.any_gpus else len(self.gpus)


def recommend(choices: Iterable[GpuChoice], needed_bytes: int, count: int) -> Recommendation:
    """Recommend up to `count` available GPUs of one vendor with enough free memory, the ones with the most first."""
    reasons, usable = {}, []
    for choice in choices:
        alone = "a MIG slice, which cannot be combined with other GPUs" if count > 1 and is_slice(choice.uuid) else ""
        obstacle = alone or _obstacle(choice, needed_bytes)
        reasons[choice.index] = obstacle or f"{gibibytes(choice.memory_free_bytes or 0)} free"
        if not obstacle:
            usable.append(choice)
    usable.sort(key=lambda choice: (-(choice.memory_free_bytes or 0), choice.index))
    gpus = tuple(choice.index for choice in of_one_vendor(usable, count)[:count])
    return Recommendation(gpus, needed_bytes, reasons, _shortfall(gpus, reasons, count))


class _OfVendor(Protocol):
    @property
    def vendor(self) -> str: ...


G = TypeVar("G", bound=_OfVendor)


def of_one_vendor(choices: Sequence[G], count: int) -> Sequence[G]:
    """Return the GPUs from the vendor supported by the PyTorch build.

    If that vendor is unknown, return the GPUs of the vendor that has the most, counting at most `count`.
    """
    by_vendor: dict[str, list[G]] = {}
    for choice in choices:
        by_vendor.setdefault(choice.vendor, []).append(choice)
    if len(by_vendor) < 2:
        return choices
    suited = vendor_of_build(list(by_vendor))
    build = installed_build()
    is_known = build is not None and build.runtime == VENDORS[suited].torch_runtime
    return by_vendor[suited] if is_known else max(by_vendor.values(), key=lambda own: min(len(own), count))


def place(proposal: Proposal[Any], choices: Sequence[GpuChoice], *, multi_gpu_enabled: bool = True) -> Placement:
    """Resolve `launch.gpus` on a proposal's machine; raise `JobFileError` if the request cannot be satisfied."""
    placement = _resolve(proposal, choices, multi_gpu_enabled)
    if fatal := errors(proposal.memory_problems()):
        raise JobFileError(fatal)
    return msgspec.structs.replace(placement, look=proposal.outlook)


def _resolve(proposal: Proposal[Any], choices: Sequence[GpuChoice], multi_gpu_enabled: bool) -> Placement:
    job, count = proposal.job, proposal.devices
    gpus = job.launch.gpus
    if job.cluster:
        return Placement("cpu" if job.on_cpu else "cuda", (), count)
    if job.on_cpu or (gpus == "auto" and not choices):
        return Placement("cpu", (), count)
    if count > 1 and not multi_gpu_enabled:
        raise _refusal(f"asks for {count} GPUs, but multi_gpu_enabled is false in the settings; name one GPU")
    any_gpus = not isinstance(gpus, list)
    if any_gpus:
        _refuse_too_many(choices, proposal)
    chosen = _find_gpus(gpus, choices) if isinstance(gpus, list) else []
    if job.exchanges and (refusal := refusal_of_slices([(gpu.index, is_slice(gpu.uuid)) for gpu in chosen])):
        raise _refusal(refusal)
    vendor = _one_vendor([one for one in choices if one.state != "unhealthy"] if any_gpus else chosen)
    if vendor and (build := installed_build()) and build.runtime not in ("", VENDORS[vendor].torch_runtime):
        raise _refusal(f"PyTorch {for_another_vendor(*build, VENDORS[vendor])}")
    is_cuda = VENDORS[vendor].device == "cuda" if vendor else proposal.machine.cuda
    device: Device = "cuda" if is_cuda else "cpu"
    return Placement(device, tuple((gpu.index, gpu.uuid) for gpu in chosen), count, any_gpus=any_gpus, vendor=vendor)


def _one_vendor(choices: Sequence[GpuChoice]) -> str:
    """Return these GPUs' vendor, or "" if it is unknown; raise `JobFileError` if they have different vendors."""
    if message := refusal_of_mixture((choice.index, choice.vendor) for choice in choices):
        raise _refusal(message)
    return next((choice.vendor for choice in choices), "")


def propose_here(
    job: J,
    choices: Sequence[GpuChoice],
    data: DataDir,
    *,
    cuda: bool,
    past: Iterable[Job] = (),
    promises: Promises = NO_PROMISES,
) -> Proposal[J]:
    """Return the proposal for a job on this machine, using the memory measured for the jobs in `past`."""
    return propose(job, machine(choices, data, cuda=cuda, promises=promises), used_before(past))


def machine(
    choices: Sequence[GpuChoice],
    data: DataDir,
    *,
    cuda: bool,
    promises: Promises = NO_PROMISES,
) -> Machine:
    """Return a description of this machine for the job checks; `cuda` is True if jobs can use CUDA on its GPUs."""
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
    problem = cuda_problem({one.vendor for one in choices if one.vendor}) if cuda and choices else ""
    return Machine(
        gpus, os.cpu_count() or 1, data.root, memory_of_host(), read_box(data.box_file), cuda, problem, promises
    )


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
    """Return the GPUs with these indices; busy GPUs are allowed, because the job can wait for them or share them.

    Raise `JobFileError` if a GPU does not exist or cannot be used.
    """
    gpu_by_index = {choice.index: choice for choice in choices}
    missing = [index for index in indices if index not in gpu_by_index]
    if missing:
        here = join_words([f"GPU {index}" for index in gpu_by_index]) if gpu_by_index else "no GPUs"
        raise _refusal(f"there is no GPU {missing[0]} here; this machine has {here}")
    for index in indices:
        if gpu_by_index[index].state == "unhealthy":
            raise _refusal(f"GPU {index} cannot be used: {gpu_by_index[index].reason}; choose another GPU")
    return [gpu_by_index[index] for index in indices]


def _refuse_too_many(choices: Sequence[GpuChoice], proposal: Proposal[Any]) -> None:
    """Raise `JobFileError` if too few GPUs are usable, even counting busy GPUs, for which the job could wait."""
    count = proposal.devices
    if not choices:
        raise _refusal(f'asks for {plural(count, "GPU")}, but this machine has none; use "cpu:{count}"')
    suited = [choice for choice in choices if proposal.takes_slices or not is_slice(choice.uuid)]
    usable = [choice for choice in suited if choice.state != "unhealthy"]
    if len(usable) < count:
        alone = "" if len(suited) == len(choices) else "; a MIG slice cannot be combined with other GPUs"
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

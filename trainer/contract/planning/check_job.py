"""Plans a job for a machine: the job's devices, its resource needs, and all reasons why it could not run there."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Generic

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.planning.forecast import UNKNOWN_MEMORY, DeviceMemory
from trainer.contract.planning.gpu_vendors import refusal_of_mixture, refusal_of_slices
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.planning.model_placement import ModelPlacement
from trainer.contract.planning.outlook import NOTHING_MEASURED, AnyOutlook, Outlook, Took, UnknownNeeds
from trainer.contract.planning.workload import ranks_of
from trainer.contract.settings.backends import check_backend
from trainer.contract.settings.catalog import KINDS
from trainer.contract.settings.job import AnyJob, J, JobConfig
from trainer.contract.settings.promised import NO_PROMISES, Promises
from trainer.contract.settings.sources import DataShape
from trainer.contract.wording import plural

# Returns the GPU memory that a finished job of the same shape used.
UsedBefore = Callable[[JobConfig, DataShape, Outlook], Took | None]


class MachineGpu(msgspec.Struct, frozen=True):
    """The facts about a GPU that the checks need; `busy` and `unhealthy` contain the reason, or are empty."""

    index: int
    name: str
    memory_free_bytes: int | None
    busy: str = ""
    unhealthy: str = ""
    memory_total_bytes: int | None = None
    # The vendor's key in `VENDORS`, if the machine has GPUs from several vendors.
    vendor: str = ""
    is_slice: bool = False


class Machine(msgspec.Struct, frozen=True):
    """The machine that a job is checked against."""

    gpus: tuple[MachineGpu, ...]
    cpu_count: int
    output_root: Path
    memory: DeviceMemory = UNKNOWN_MEMORY
    speeds: MeasuredHardware = NOTHING_MEASURED
    # Whether jobs use CUDA on the GPUs (simulated GPUs are CPU processes), and why CUDA is unusable, if it is.
    cuda: bool = True
    cuda_problem: str = ""
    # The folders that other jobs will have written before this job starts.
    promises: Promises = NO_PROMISES


class Proposal(Generic[J]):
    """The plan for a job on a machine; its values are computed once and shared by the checks, outlook and placement.

    Each kind of job has a subclass. Only the outlook of a training job uses `used_before`.
    """

    def __init__(self, job: J, machine: Machine, used_before: UsedBefore | None = None) -> None:
        self.job, self.machine, self._used_before = job, machine, used_before
        self.devices = wanted_devices(job)
        # The number of training devices, excluding GPUs that only run the job's language model.
        self.ranks = ranks_of(job, self.devices)
        self.takes_slices = takes_slices(job, self.devices)

    @cached_property
    def outlook(self) -> AnyOutlook:
        """The resources that the job needs on this machine or, for "auto", on the GPUs that it would get now.

        May raise `JobFileError`.
        """
        return UnknownNeeds(bool(self.gpus) and not self.job.on_cpu, self.devices)

    def memory_problems(self) -> list[Problem]:
        """Return the memory problems in the job's outlook."""
        return []

    def problems(self) -> list[Problem]:
        """Return all problems with running the job on this machine, both errors and warnings, each with its setting."""
        return [*self.device_problems(), *self.memory_problems()]

    def comes_to(self) -> dict[str, str]:
        """Return a dict mapping each overridden setting to its effective value, if known, followed by a space."""
        return {}

    @staticmethod
    def total_steps(job: J, devices: int) -> int:
        """Return the total number of steps in a job, for its progress bar; 0 if steps are not counted."""
        return 0

    @staticmethod
    def place_model(
        job: J, devices: int, device_name: str, box: MeasuredHardware, capacity: DeviceMemory,
        memory_of: str | None, ranks_before: int | None,
    ) -> ModelPlacement | None:  # fmt: skip
        """Choose how many devices only run the language model; see the function `place_model`.

        Return None if there is no language model.
        """
        return None

    @staticmethod
    def half_batch(job: J, devices: int) -> list[str]:
        """Return setting overrides that halve activation memory on `devices` devices without changing the result.

        Return [] if there are no such overrides.
        """
        return []

    @property
    def gpus(self) -> list[MachineGpu]:
        """The usable GPUs, in the order in which the job would get them."""
        usable = [gpu for gpu in self.machine.gpus if not gpu.unhealthy]
        return sorted(usable, key=lambda gpu: (bool(gpu.busy), -(gpu.memory_free_bytes or 0), gpu.index))

    def device_problems(self) -> list[Problem]:
        """Return the problems with the devices that the job requests."""
        job, machine = self.job, self.machine
        problems = []
        by_index = {gpu.index: gpu for gpu in machine.gpus}
        for index in chosen_indices(job):
            if index not in by_index:
                indices = ", ".join(map(str, by_index)) or "none"
                problems.append(Problem("launch.gpus", f"there is no GPU {index} here; this machine has {indices}"))
            elif by_index[index].unhealthy:
                problems.append(Problem("launch.gpus", f"GPU {index} cannot be used: {by_index[index].unhealthy}"))
            elif by_index[index].busy:
                problems.append(Problem("launch.gpus", f"GPU {index} is busy: {by_index[index].busy}", "warning"))
        problems += self._vendor_problems()
        problems += self._slice_problems()
        problems += check_backend(job)
        problems += [] if job.cluster else self._count_problems()
        if machine.cuda_problem and not job.cluster and machine.gpus and not job.on_cpu:
            problems.append(Problem("launch.gpus", machine.cuda_problem))
        return problems

    def _vendor_problems(self) -> list[Problem]:
        """Report a problem if the GPUs that the job may use are from different vendors."""
        job, machine = self.job, self.machine
        if job.cluster or job.on_cpu:
            return []
        named = chosen_indices(job)
        gpus = [
            (gpu.index, gpu.vendor) for gpu in machine.gpus if not gpu.unhealthy and (not named or gpu.index in named)
        ]
        message = refusal_of_mixture(gpus)
        return [Problem("launch.gpus", message)] if message else []

    def _slice_problems(self) -> list[Problem]:
        """Report a problem if a job's devices exchange tensors and MIG slices are among its GPUs."""
        named = chosen_indices(self.job)
        gpus = [(gpu.index, gpu.is_slice) for gpu in self.machine.gpus if gpu.index in named]
        message = refusal_of_slices(gpus) if self.job.exchanges else ""
        return [Problem("launch.gpus", message)] if message else []

    def _count_problems(self) -> list[Problem]:
        """Report a problem if the machine has fewer GPUs or cores than a setting like "auto:4" or "cpu:4" requests."""
        job, machine, devices = self.job, self.machine, self.devices
        suited = [gpu for gpu in machine.gpus if self.takes_slices or not gpu.is_slice]
        usable = sum(not gpu.unhealthy for gpu in suited)
        if str(job.launch.gpus).startswith("auto:") and devices > usable:
            slices = "" if len(suited) == len(machine.gpus) else "; a MIG slice cannot be combined with other GPUs"
            here = f"{usable} that can be used{slices}" if machine.gpus else f'none; use "cpu:{devices}"'
            return [Problem("launch.gpus", f"asks for {plural(devices, 'GPU')}, but this machine has {here}")]
        if str(job.launch.gpus).startswith("cpu:") and devices > machine.cpu_count:
            cores = plural(machine.cpu_count, "core")
            message = f"starts {devices} processes on {cores}; one process per core would be faster"
            return [Problem("launch.gpus", message, "warning")]
        return []


def propose(job: J, machine: Machine, used_before: UsedBefore | None = None) -> Proposal[J]:
    """Plan a job of any kind for a machine."""
    return proposal_class(job)(job, machine, used_before)


def proposal_class(job: J) -> type[Proposal[J]]:
    """Return the planner class for this kind of job."""
    loaded: type[Proposal[J]] = pkgutil.resolve_name(KINDS[job.kind].proposal)
    return loaded


def check(job: AnyJob, machine: Machine) -> list[Problem]:
    """Return all problems with running a job on this machine, both errors and warnings, each with its setting."""
    return propose(job, machine).problems()


def chosen_indices(job: AnyJob) -> list[int]:
    """Return the GPU indices in a job file; [] for "auto", "cpu" and clusters."""
    return list(job.launch.gpus) if isinstance(job.launch.gpus, list) and not job.cluster else []


def wanted_ranks(job: AnyJob) -> int:
    """Return how many ranks the job file requests: its devices minus the GPUs that only run its language model."""
    return ranks_of(job, wanted_devices(job))


def wanted_devices(job: AnyJob) -> int:
    """Return how many GPUs or CPU processes the job file requests on all nodes; "auto" and "cpu" mean 1 per node."""
    gpus, nodes = job.launch.gpus, job.launch.nodes if job.cluster else 1
    if isinstance(gpus, list):
        return nodes * len(gpus)
    _, _, count = gpus.partition(":")
    return nodes * int(count or 1)


def takes_slices(job: AnyJob, devices: int) -> bool:
    """Return whether a job's GPUs may be MIG slices; ranks on slices cannot exchange tensors."""
    return devices == 1 or not job.exchanges

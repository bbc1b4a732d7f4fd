"""The outlook for a job on its devices: its mode, and the memory that each rank needs and may use.

All code that shows, checks or waits for a job's memory calls this module, so that the results agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.planning import memory
from trainer.contract.planning.choose_mode import Settled
from trainer.contract.planning.forecast import UNKNOWN_MEMORY, DeviceMemory, settle_on
from trainer.contract.planning.hardware import CPU, MeasuredHardware, slowest
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.model_placement import ModelPlacement, place_model
from trainer.contract.planning.workload import Workload, with_model_gpus
from trainer.contract.settings.job import JobConfig, Launch
from trainer.contract.settings.sources import DataShape
from trainer.contract.wording import distinct_sizes, gibibytes

NOTHING_MEASURED = MeasuredHardware()


class PlannedGpu(Protocol):
    """A GPU with its free and total memory in bytes (None if not reported); `busy` says who is using it, or is ""."""

    @property
    def index(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def memory_free_bytes(self) -> int | None: ...
    @property
    def memory_total_bytes(self) -> int | None: ...
    @property
    def busy(self) -> str: ...


class AnyOutlook(Protocol):
    """The resources that a job of any kind needs on each of its devices, and how the devices share the work.

    `needs_bytes` is None if unknown. `lack` is a message about a current lack of memory, or "".
    """

    @property
    def on_gpus(self) -> bool: ...
    @property
    def ranks(self) -> int: ...
    @property
    def mode(self) -> str: ...
    @property
    def needs_bytes(self) -> int | None: ...
    @property
    def lack(self) -> str: ...


class UnknownNeeds(msgspec.Struct, frozen=True):
    """The outlook for a job whose needs cannot be estimated."""

    on_gpus: bool
    ranks: int
    mode: str = "single"
    needs_bytes: int | None = None
    lack: str = ""


class Took(msgspec.Struct, frozen=True):
    """The GPU memory in bytes that a finished job of the same shape used."""

    job_id: int
    n_bytes: int


class Outlook(msgspec.Struct, frozen=True):
    """A training job with its mode resolved, and the memory available to each of its ranks.

    `lack` is a message if the job needs more memory than is currently free, and `excess` is a message if it needs more
    than the devices have in total; otherwise they are "". `placed` is the placement of the language model, if the job
    has one.
    """

    settled: Settled
    on_gpus: bool
    is_measured: bool = False
    capacity: DeviceMemory = UNKNOWN_MEMORY
    lack: str = ""
    excess: str = ""
    took: Took | None = None
    placed: ModelPlacement | None = None

    @property
    def devices(self) -> int:
        """The number of ranks plus the number of devices that only run a language model."""
        return self.ranks + self.settled.work.model_gpus

    @property
    def fullest(self) -> Memory:
        """The memory needed by the most demanding device, which may be one that only runs a language model."""
        reader = self._fullest_reader
        return reader or self.settled.memory

    @property
    def ranks(self) -> int:
        return self.settled.work.ranks

    @property
    def mode(self) -> str:
        return self.settled.job.parallel.mode

    @property
    def needs_bytes(self) -> int:
        """The bytes needed per device: the estimate or, if it is larger, the measured use of a similar job.

        A measured use above the free memory is ignored because PyTorch may have reserved more memory than the job
        needed.
        """
        estimate, free = self.fullest.total, self.capacity.free_bytes
        if self.took and estimate < self.took.n_bytes <= (self.took.n_bytes if free is None else free):
            return self.took.n_bytes
        return estimate

    def problems(self, job: JobConfig) -> list[Problem]:
        """Return the memory problems: an error if the job can never run, a warning if it cannot run now.

        `job` is the job as written, with `auto` not resolved.
        """
        if self.excess:
            cure = self._cure(self.capacity.total_bytes or 0, "larger GPUs")
            return [Problem(self._culprit(job), f"{self.excess}; {cure}")]
        if self.lack:
            cure = self._cure(self.capacity.free_bytes or 0, "other GPUs")
            return [Problem("launch.gpus", f"{self.lack}; {cure}", "warning")]
        if self.took and self.took.n_bytes > max(self.needs_bytes, self.capacity.free_bytes or 0):
            took, has = distinct_sizes(self.took.n_bytes, self.capacity.free_bytes or 0)
            message = f"a GPU has only {has} free, but job {self.took.job_id} of the same shape used {took} per GPU"
            return [Problem("launch.gpus", message, "warning")]
        return []

    def _cure(self, room_bytes: int, others: str) -> str:
        """Return advice on insufficient memory: changes that each make the job fit, or else settings to lower."""
        job = self.settled.job
        if (reader := self._fullest_reader) and reader.total > room_bytes:
            return f"lower data.batch_tokens, or choose a smaller model or {others}"
        fitting = self.remedies(room_bytes)
        other = f", or choose {others}" if self.on_gpus else ""
        if fitting:
            return f"it fits with {' or '.join(fitting)}{other}"
        return "lower train.batch_size or sae.d_sae" + (", use a smaller sweep" if job.sweep else "") + other

    def remedies(self, room_bytes: int) -> list[str]:
        """Return changes to individual settings, each of which would make the job fit into `room_bytes` per device."""
        reader = self._fullest_reader
        can_help = self.on_gpus and not (reader and reader.total > room_bytes)
        return memory.remedies(self.settled.held, room_bytes) if can_help else []

    @property
    def _fullest_reader(self) -> Memory | None:
        """The memory needed by a device that only runs a language model, or None if a training device needs more."""
        reader = self.placed.reader if self.placed else None
        return reader if reader and reader.total > self.settled.needs_bytes else None

    def _culprit(self, job: JobConfig) -> str:
        """Return the setting that accounts for most of the memory."""
        if self._fullest_reader:
            return "data.model"
        parts = self.settled.memory
        by_tokens = parts.activations + parts.communication
        if by_tokens > parts.weights + parts.gradients + parts.optimizer and job.train.batch_size != "auto":
            return "train.batch_size"
        return "sae.d_sae" if job.sae.d_sae else "sae.expansion_factor"


def outlook(
    job: JobConfig,
    shape: DataShape,
    devices: int,
    gpus: Sequence[PlannedGpu],
    *,
    speeds: MeasuredHardware = NOTHING_MEASURED,
    cuda: bool = True,
    host: DeviceMemory = UNKNOWN_MEMORY,
) -> Outlook:
    """Return the outlook for a job on the GPUs in `launch.gpus` or, for "auto", on the first of `gpus`.

    Without `cuda`, the GPUs are simulated by CPU processes on this host. `host` is this machine's memory, which limits
    CPU processes.
    """
    gpus = () if job.cluster else gpus
    if job.on_cpu or (job.launch.gpus == "auto" and not gpus and not job.cluster):
        return _in_processes(job, shape, devices, speeds, UNKNOWN_MEMORY if job.cluster else host)
    chosen = ChosenGpus(job.launch, gpus, devices)
    name = CPU if not cuda else slowest(gpu.name for gpu in chosen.now) if chosen.now else ""
    placed = place_model(job, shape, devices, name, speeds, chosen.capacity, None if cuda else "")
    lack, excess = chosen.lack(placed.needs_bytes), chosen.excess(placed.needs_bytes)
    return Outlook(placed.settled, True, placed.is_measured, chosen.capacity, lack, excess, placed=placed)


class ChosenGpus:
    """The GPUs assigned to a job: the GPUs in `launch.gpus`, or any `ranks` of `gpus`, currently the first ones."""

    def __init__(self, launch: Launch, gpus: Sequence[PlannedGpu], ranks: int) -> None:
        self._launch, self._gpus, self._ranks = launch, gpus, ranks
        wanted = launch.gpus
        self._named = isinstance(wanted, list)
        by_size = sorted(gpus, key=lambda gpu: -(gpu.memory_total_bytes or 0))
        self.now = [gpu for gpu in gpus if gpu.index in wanted] if isinstance(wanted, list) else list(gpus[:ranks])
        ever = self.now if self._named else by_size[:ranks]
        self.capacity = DeviceMemory(
            _least(gpu.memory_free_bytes for gpu in self.now), _least(gpu.memory_total_bytes for gpu in ever)
        )

    def lack(self, needs_bytes: int) -> str:
        """Return a message if the job needs more memory than is currently free; otherwise ""."""
        if not _exceeds(needs_bytes, self.capacity.free_bytes):
            return ""
        if self._named:
            return _lack(self.now, needs_bytes)
        return _lack_of_any(self._launch, self._gpus, self._ranks, needs_bytes)

    def excess(self, needs_bytes: int) -> str:
        """Return a message if the job needs more memory per GPU than a GPU has in total; otherwise ""."""
        if not _exceeds(needs_bytes, self.capacity.total_bytes):
            return ""
        gpus = self.now if self._named else self._gpus
        return _excess(gpus, self._ranks, needs_bytes, named=self._named)


def _in_processes(
    job: JobConfig, shape: DataShape, ranks: int, speeds: MeasuredHardware, host: DeviceMemory
) -> Outlook:
    """Return the outlook for a job running as CPU processes, which all share the memory of one host."""
    job = with_model_gpus(job, ranks, 0)
    capacity = DeviceMemory(
        *(None if n_bytes is None else n_bytes // ranks for n_bytes in (host.free_bytes, host.total_bytes))
    )
    settled, is_measured = settle_on(Workload(job, ranks, shape, CPU), speeds, capacity)
    lack, excess = lack_of_host(ranks * settled.needs_bytes, host, ranks)
    return Outlook(settled, False, is_measured, capacity, lack, excess)


def lack_of_host(needs_bytes: int, host: DeviceMemory, n_processes: int = 1) -> tuple[str, str]:
    """Return one message if CPU processes need more than the free memory, and one if they need more than the total.

    Each message is "" if it does not apply.
    """
    lack = excess = ""
    if _exceeds(needs_bytes, host.free_bytes):
        lack = "this machine has {1} free of {0} needed".format(*distinct_sizes(needs_bytes, host.free_bytes or 0))
    if _exceeds(needs_bytes, host.total_bytes):
        each = f" for {n_processes} processes" if n_processes > 1 else ""
        needs, has = distinct_sizes(needs_bytes, host.total_bytes or 0)
        excess = f"needs {needs}{each}, and this machine has {has} in total"
    return lack, excess


def _exceeds(needs_bytes: int, room_bytes: int | None) -> bool:
    return room_bytes is not None and needs_bytes > room_bytes


def _lack_of_any(launch: Launch, gpus: Sequence[PlannedGpu], ranks: int, needs_bytes: int) -> str:
    """Return a message such as `1 of 4 GPUs is free and has the 17.9 GiB that it needs on 2`; "" if enough are free."""
    free = [gpu for gpu in gpus if launch.share or not gpu.busy]
    enough = sum(gpu.memory_free_bytes is None or gpu.memory_free_bytes >= needs_bytes for gpu in free)
    if enough >= ranks:
        return ""
    few = f"{enough} of {len(gpus)} GPUs {'is' if enough == 1 else 'are'} free and {'has' if enough == 1 else 'have'}"
    each = f" on {ranks}" if ranks > 1 else ""
    return f"{few if enough else 'no GPU is free and has'} the {gibibytes(needs_bytes)} that it needs{each}"


def _lack(gpus: Sequence[PlannedGpu], needs_bytes: int) -> str:
    """Return a message about the fullest GPU, such as `GPU 2 has 9.1 GiB free of 17.9 GiB needed`."""
    fullest = min(gpus, key=lambda gpu: _or_inf(gpu.memory_free_bytes))
    has, needs = distinct_sizes(fullest.memory_free_bytes or 0, needs_bytes)
    # If no process uses the GPU, say so, because waiting will not free memory that a driver or a desktop uses.
    idle = "" if fullest.busy or fullest.memory_total_bytes is None else ", although no process is using it"
    return f"GPU {fullest.index} has {has} free of {needs} needed{idle}"


def _excess(gpus: Sequence[PlannedGpu], ranks: int, needs_bytes: int, *, named: bool) -> str:
    """Return a message such as `needs 17.9 GiB on each of 3 GPUs, and GPU 2 has 10.0 GiB in total`.

    If the job names no GPUs, the message says how many GPUs have enough memory.
    """
    each = f" on each of {ranks} GPUs" if ranks > 1 else ""
    if named:
        smallest = min(gpus, key=lambda gpu: _or_inf(gpu.memory_total_bytes))
        needs, has = distinct_sizes(needs_bytes, smallest.memory_total_bytes or 0)
        return f"needs {needs}{each}, and GPU {smallest.index} has {has} in total"
    enough = sum(gpu.memory_total_bytes is None or gpu.memory_total_bytes >= needs_bytes for gpu in gpus)
    needs, has = distinct_sizes(needs_bytes, max(gpu.memory_total_bytes or 0 for gpu in gpus))
    return f"needs {needs}{each}, and " + (f"only {enough} of {len(gpus)} have" if enough else f"the largest has {has}")


def _or_inf(n_bytes: int | None) -> float:
    return math.inf if n_bytes is None else n_bytes


def _least(sizes: Iterable[int | None]) -> int | None:
    """Return the smallest known size, or None if all are unknown."""
    return min((n_bytes for n_bytes in sizes if n_bytes is not None), default=None)

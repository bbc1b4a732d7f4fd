"""Chooses the GPUs that run a training job's language model: the training GPUs, or separate GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from trainer.contract.planning import memory
from trainer.contract.planning.choose_mode import LEAST_GAIN, Settled
from trainer.contract.planning.forecast import UNKNOWN_MEMORY, DeviceMemory, can_share, settle_on
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.planning.memory import Memory
from trainer.contract.planning.workload import Workload, ranks_of, with_model_gpus
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape
from trainer.contract.wording import gibibytes, join_words, plural

# Modes without separate GPUs for the model: they use a single device, or one process for all devices.
_FIXED = ("single", "dp")


class ModelPlacement(msgspec.Struct, frozen=True):
    """A job with `model_gpus` devices reserved for its language model and its mode resolved on the other devices.

    `reader` is the memory needed on one of the reserved devices. `why` is a clause giving the reason for an automatic
    choice.
    """

    model_gpus: int
    settled: Settled
    is_measured: bool
    reader: Memory | None = None
    why: str = ""

    @property
    def devices(self) -> int:
        return self.settled.work.ranks + self.model_gpus

    @property
    def needs_bytes(self) -> int:
        """The memory in bytes that the most demanding device needs."""
        return max(self.settled.needs_bytes, self.reader.total if self.reader else 0)

    @property
    def sentence(self) -> str:
        """The placement and its reason, such as `the language model has 6 of 8 GPUs to itself: next to the SAE it would
        not fit into 24.0 GiB`.
        """
        return words_of_place(self.model_gpus, self.devices, self.why)


def words_of_place(model_gpus: int, devices: int, why: str = "") -> str:
    """Return a sentence about where a training job's language model runs and, if known, why."""
    where = "shares the training GPUs"
    if model_gpus:
        where = f"has {model_gpus} of {devices} GPUs to itself"
    return f"the language model {where}{f': {why}' if why else ''}"


def counts_that_work(devices: int) -> list[int]:
    """Return the possible numbers of GPUs that only run the model: multiples of the number of training GPUs."""
    return [own for own in range(1, devices) if own % (devices - own) == 0]


def refusal_of_model_gpus(job: JobConfig, devices: int) -> str:
    """Return a sentence saying why `data.model_gpus` is invalid for this number of devices; "" if it is valid."""
    asked = job.model_gpus
    if asked in (0, "auto"):
        return ""
    if obstacle := _obstacle(job):
        return f'{asked} separate GPUs for the model are not possible with {obstacle}; use 0 or "auto"'
    counts = counts_that_work(devices)
    if asked in counts:
        return ""
    if not counts:
        remedy = 'use 0 or "auto", or set launch.gpus to at least 2 GPUs'
        return f"{plural(devices, 'GPU')} cannot reserve {asked} for the model; {remedy}"
    works = f"{join_words([str(count) for count in counts])} {'works' if len(counts) == 1 else 'work'}"
    return f"with {devices} GPUs, only {works}, not {asked}: each training GPU needs the same number of model GPUs"


def _obstacle(job: JobConfig) -> str:
    """Return the setting that rules out separate GPUs for the model, or "" if none does."""
    if job.on_cpu:
        return f'launch.gpus = "{job.launch.gpus}"'
    if job.cluster:
        return f'launch.backend = "{job.launch.backend}"'
    return f'parallel.mode = "{job.parallel.mode}"' if job.parallel.mode == "dp" else ""


def place_model(
    job: JobConfig,
    shape: DataShape,
    devices: int,
    device_name: str,
    box: MeasuredHardware,
    capacity: DeviceMemory = UNKNOWN_MEMORY,
    memory_of: str | None = None,
    *,
    ranks_before: int | None = None,
) -> ModelPlacement:
    """Resolve a job on `devices` devices, and choose how many of them only run its language model.

    If the job does not set the number, choose the fastest placement that fits into the free memory or, if none does,
    into the total memory. Separate GPUs are used only if that is clearly faster. A resumed run keeps `ranks_before`
    ranks if possible because each rank has read its own shard of the text. See `settle_on` for the other arguments.
    """
    whole = Workload(job, devices, shape, device_name)

    def on(own: int) -> ModelPlacement:
        placed = with_model_gpus(job, devices, own)
        work = Workload(placed, ranks_of(placed, devices), shape, device_name)
        settled, is_measured = settle_on(work, box, capacity, memory_of)
        return ModelPlacement(own, settled, is_measured, memory.of_reader(settled.held))

    asked = job.model_gpus
    if asked != "auto":
        return on(asked)
    counts = list(_counts(whole))
    if ranks_before is not None and devices - ranks_before in counts and len(counts) > 1:
        return msgspec.structs.replace(
            on(devices - ranks_before), why="as before, since each rank has read its own part of the text"
        )
    ways = [on(own) for own in counts]
    if len(ways) == 1:
        return ways[0]
    best = min(ways, key=lambda way: _rank(way, capacity))
    return msgspec.structs.replace(best, why=_why(best, ways, capacity))


def _counts(whole: Workload) -> Iterator[int]:
    """Yield the possible numbers of devices that only run the model, starting with 0."""
    yield 0
    job = whole.job
    if job.parallel.mode in _FIXED or ":" in job.parallel.shares or _obstacle(job):
        return
    for own in counts_that_work(whole.ranks):
        placed = with_model_gpus(job, whole.ranks, own)
        if job.parallel.mode == "auto" or can_share(Workload(placed, whole.ranks - own, whole.shape)):
            yield own


def _rank(way: ModelPlacement, capacity: DeviceMemory) -> tuple[int, float]:
    """Return a sort key, lowest for the best placement: `_lack`, then the time, or the bytes if it does not fit."""
    lack = _lack(way, capacity)
    if lack == 2:
        return lack, way.needs_bytes
    return lack, way.settled.time.total_s * (LEAST_GAIN if way.model_gpus else 1.0)


def _lack(way: ModelPlacement, capacity: DeviceMemory) -> int:
    """Return 0 if a placement fits into the free memory, 1 if it fits only into the total memory, and otherwise 2."""
    limits = [limit for limit in (capacity.free_bytes, capacity.total_bytes) if limit is not None]
    fits = [way.needs_bytes <= limit for limit in limits]
    return 0 if all(fits) else 1 if any(fits) else 2


def _why(best: ModelPlacement, ways: list[ModelPlacement], capacity: DeviceMemory) -> str:
    """Return a clause comparing the chosen placement of the model with the best alternative."""
    lack = _lack(best, capacity)
    if lack == 2:
        return f"this needs the least memory, {gibibytes(best.needs_bytes)} per GPU, but less is available"
    others = [way for way in ways if (way.model_gpus == 0) != (best.model_gpus == 0)]
    other = min(others, key=lambda way: _rank(way, capacity))
    where = "next to the SAE" if best.model_gpus else f"with {other.model_gpus} of {best.devices} GPUs reserved for it,"
    if _lack(other, capacity) > lack:
        limit = (capacity.free_bytes, capacity.total_bytes)[lack] or capacity.total_bytes or 0
        return f"{where} it would not fit into {gibibytes(limit)}"
    times = other.settled.time.total_s / best.settled.time.total_s
    return f"{where} a step would take {f'{times:.1f}× as long' if times >= LEAST_GAIN else 'about the same time'}"

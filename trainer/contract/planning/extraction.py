"""Estimates an extraction's memory, disk space and time from its model's files, and reports shortages.

The memory estimate covers the loaded weights and the peak of one forward pass. The time estimate covers only the
matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import msgspec

from trainer.contract.errors import Problem
from trainer.contract.extras import install, is_installed
from trainer.contract.object_paths import is_url
from trainer.contract.paths import free_disk
from trainer.contract.planning.check_job import Proposal
from trainer.contract.planning.forecast import UNKNOWN_MEMORY, DeviceMemory
from trainer.contract.planning.hardware import CPU, MeasuredHardware, slowest
from trainer.contract.planning.memory import Memory, context_bytes
from trainer.contract.planning.outlook import NOTHING_MEASURED, ChosenGpus, PlannedGpu, lack_of_host
from trainer.contract.planning.stored_extraction import check_what_is_there
from trainer.contract.settings.extract import SHARDS_IN_FLIGHT, STATE, ExtractJob, lack_of_output
from trainer.contract.settings.language import lack_of_model, lack_of_text
from trainer.contract.settings.model_size import READING_SPEED, ModelSize, model_size
from trainer.contract.settings.rows import INT8, row_bytes
from trainer.contract.wording import distinct_sizes, gibibytes

# The total size of a row's `token_ids`, `positions` and `document`, in bytes.
_ORIGIN_BYTES = 20
SPREAD = "spread"


class ExtractionOutlook(msgspec.Struct, frozen=True):
    """The resources that an extraction needs; a value that cannot be determined from the model's files is None."""

    on_gpus: bool
    memory: Memory | None = None
    seconds: float | None = None
    d_in: int | None = None
    disk_bytes: int | None = None
    # Also None if the file system reports no size.
    disk_free_bytes: int | None = None
    capacity: DeviceMemory = UNKNOWN_MEMORY
    lack: str = ""
    excess: str = ""
    ranks: int = 1
    # How the devices share the work, as shown in the job table.
    mode: str = "single"
    # The name of the slowest device, and whether its speed was measured on this machine.
    device_name: str = CPU
    is_measured: bool = False

    @property
    def needs_bytes(self) -> int | None:
        return self.memory.total if self.memory else None

    def problems(self) -> list[Problem]:
        """Return the memory problems: an error if the extraction can never run, a warning if it cannot run now."""
        spread = "" if self.mode == SPREAD or not self.on_gpus else ", set model.spread = true with several GPUs"
        cure = f"lower extract.batch_tokens{spread}, or choose a smaller model"
        if self.excess:
            return [Problem("model.path", f"{self.excess}; {cure}")]
        return [Problem("launch.gpus", f"{self.lack}; {cure}", "warning")] if self.lack else []


class ExtractionProposal(Proposal[ExtractJob]):
    """The plan for an extraction job on a machine."""

    @cached_property
    def outlook(self) -> ExtractionOutlook:
        on = self.machine
        return outlook_of_extraction(
            self.job, self.gpus, ranks=self.ranks, speeds=on.speeds, cuda=on.cuda, host=on.memory
        )

    def memory_problems(self) -> list[Problem]:
        return self.outlook.problems()

    def problems(self) -> list[Problem]:
        return [*self.device_problems(), *check_extraction(self.job, self.outlook)]

    @staticmethod
    def total_steps(job: ExtractJob, devices: int) -> int:
        return job.extract.n_tokens

    @staticmethod
    def half_batch(job: ExtractJob, devices: int) -> list[str]:
        half_tokens = job.extract.batch_tokens // 2
        return [f"extract.batch_tokens={half_tokens}"] if half_tokens >= job.text.context else []


def outlook_of_extraction(
    job: ExtractJob,
    gpus: Sequence[PlannedGpu],
    *,
    ranks: int = 1,
    speeds: MeasuredHardware = NOTHING_MEASURED,
    cuda: bool = True,
    host: DeviceMemory = UNKNOWN_MEMORY,
) -> ExtractionOutlook:
    """Return the resources that an extraction needs on the GPUs in `launch.gpus` or, by default, on the first GPUs.

    Simulated GPUs run on the CPU. Each rank loads its own model, unless one model is spread over the GPUs. The hardware
    of a cluster's nodes is unknown.
    """
    gpus, host = ((), UNKNOWN_MEMORY) if job.cluster else (gpus, host)
    size = model_size(job.model.path, job.model.revision)
    on_gpus = not job.on_cpu and bool(gpus or job.cluster)
    chosen = ChosenGpus(job.launch, gpus, ranks)
    capacity = chosen.capacity if on_gpus else host
    if size is None:
        return ExtractionOutlook(on_gpus, capacity=capacity, ranks=ranks, mode=mode_of(job))
    is_cuda = on_gpus and cuda
    memory = _memory(job, size, is_cuda, ranks)
    needs_bytes = memory.total
    lack, excess = (
        (chosen.lack(needs_bytes), chosen.excess(needs_bytes))
        if on_gpus
        else lack_of_host(ranks * needs_bytes, host, ranks)
    )
    name = slowest(gpu.name for gpu in chosen.now) if is_cuda and chosen.now else CPU
    precision = "fp32" if name == CPU or job.model.dtype == "fp32" else "bf16"
    measured = speeds.speeds(name, precision, 1)
    return ExtractionOutlook(
        on_gpus=on_gpus,
        memory=memory,
        # Additional devices save no time on a CPU, where the processes share the cores, or with a spread model, because
        # its GPUs take turns.
        seconds=_seconds(job, size, measured.flops_per_s) / (ranks if is_cuda and not job.model.spread else 1),
        d_in=size.width,
        disk_bytes=_disk_bytes(job, size, is_cuda),
        disk_free_bytes=free_disk(job.local_output)[1],
        capacity=capacity,
        lack=lack,
        excess=excess,
        ranks=ranks,
        mode=mode_of(job),
        device_name=name,
        is_measured=measured.is_measured,
    )


def disk_words(look: ExtractionOutlook) -> str:
    """Return the required and the free disk space, such as `0.1 GiB of disk, 38.0 GiB free`."""
    free = "" if look.disk_free_bytes is None else f", {gibibytes(look.disk_free_bytes)} free"
    return f"{gibibytes(look.disk_bytes or 0)} of disk{free}"


def mode_of(job: ExtractJob) -> str:
    """Return how an extraction's devices share the work: "spread" or "single"."""
    return SPREAD if job.model.spread else "single"


def check_extraction(job: ExtractJob, outlook: ExtractionOutlook) -> list[Problem]:
    """Return the problems that would prevent an extraction on this machine, except problems with its devices."""
    problems = outlook.problems()
    if not is_installed("transformers"):
        problems.append(Problem("model.path", f"reading a language model needs `{install('hf')}`"))
    size = model_size(job.model.path, job.model.revision)
    lacks = {
        "text.context": size and size.lack_of_context(job.text.context),
        "text.path": job.text.path and lack_of_text(job.text.path),
        "model.path": lack_of_model(job.model.path),
        "extract.output": lack_of_output(job),
    }
    problems += [Problem(setting, lack) for setting, lack in lacks.items() if lack]
    problems += _check_hooks(job)
    return problems + check_what_is_there(job) + _check_disk(job, outlook)


def _check_hooks(job: ExtractJob) -> list[Problem]:
    size = model_size(job.model.path, job.model.revision)
    beyond = [hook for hook in job.hooks if size and not hook.path and hook.layer >= size.n_layers]
    if not size or not beyond:
        return []
    return [
        Problem("model.hooks", f"{beyond[0].name}: the model has blocks 0 to {size.n_layers - 1}; choose one of them")
    ]


def batch_that_fits(job: ExtractJob, free_bytes: int, *, cuda: bool, n_gpus: int = 1) -> int:
    """Return the largest half, quarter, ... of `extract.batch_tokens` that fits into memory; 0 if none does."""
    size, tokens = model_size(job.model.path, job.model.revision), job.extract.batch_tokens // 2
    while size and tokens >= job.text.context:
        smaller = job.replace("extract", batch_tokens=tokens)
        if _memory(smaller, size, cuda, n_gpus).total <= free_bytes:
            return tokens
        tokens //= 2
    return 0


def _check_disk(job: ExtractJob, outlook: ExtractionOutlook) -> list[Problem]:
    folder, free = free_disk(job.local_output)
    is_begun = (job.local_output / STATE).exists()
    if outlook.disk_bytes is None or free is None or outlook.disk_bytes <= free or is_begun:
        return []
    needs, has = distinct_sizes(outlook.disk_bytes, free)
    message = f"{job.extract.n_tokens:,} rows take {needs}, and {folder} has {has} free; choose fewer or another folder"
    return [Problem("extract.n_tokens", message)]


def _memory(job: ExtractJob, size: ModelSize, is_cuda: bool, n_gpus: int = 1) -> Memory:
    """Return the memory per device.

    A model is split at block boundaries, so one GPU may get one block more than the average.
    """
    each = size.value_bytes(job.model.dtype, on_cuda=is_cuda)
    tokens = max(job.extract.batch_tokens, job.text.context)
    share = min(1.0, 1 / n_gpus + 1 / size.n_layers) if is_cuda and job.model.spread and n_gpus > 1 else 1.0
    # The memory for rows buffered until their shard is complete.
    row = _row_bytes(job, size, is_cuda)
    waiting = 0 if is_cuda else (job.extract.shard_rows + tokens) * row * len(job.model.hooks)
    return Memory(
        weights=round(size.n_parameters * each * share),
        gradients=0,
        optimizer=0,
        activations=size.pass_bytes(tokens, job.text.context, each) + waiting,
        communication=0,
        slack=0,
        context=context_bytes("cuda" if is_cuda else "cpu"),
    )


def _disk_bytes(job: ExtractJob, size: ModelSize, is_cuda: bool) -> int:
    n_rows = job.extract.n_tokens
    if is_url(job.extract.output):
        # Shards are removed from the disk when they are uploaded.
        n_rows = min(n_rows, (SHARDS_IN_FLIGHT + 1) * job.extract.shard_rows)
    return n_rows * len(job.model.hooks) * (_row_bytes(job, size, is_cuda) + _ORIGIN_BYTES)


def _row_bytes(job: ExtractJob, size: ModelSize, is_cuda: bool) -> int:
    """Return the size of a stored row, without its token and place."""
    if job.extract.dtype == "int8":
        return row_bytes(size.width, INT8)
    dtype = job.model.dtype if job.extract.dtype == "auto" else job.extract.dtype
    return size.width * size.value_bytes(dtype, on_cuda=is_cuda)


def _seconds(job: ExtractJob, size: ModelSize, flops_per_s: float) -> float:
    """Return the time in seconds for the matmuls over all tokens."""
    flops = size.flops_per_token(job.hooks) * job.extract.n_tokens
    return flops / (READING_SPEED * flops_per_s)

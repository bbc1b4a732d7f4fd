"""What a job takes on 1, 2, 4 and 8 GPUs in every mode, and what to choose on this box."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from sae_tui.doctor.base import Finding
from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.words import gigabytes, listed, plural
from trainer.contract import memory
from trainer.contract.catalog import OPTIMIZERS
from trainer.contract.job import JobConfig
from trainer.contract.source_knobs import DataShape

COUNTS = (1, 2, 4, 8)


class JobRow(msgspec.Struct, frozen=True):
    """One way to run the job. `gpus` are the roomiest so many, empty where there are fewer; `fits` is None then.

    `fits_now` is whether the job fits beside what is on those GPUs at the moment.
    """

    n_gpus: int
    mode: str
    memory_bytes: int
    gpus: tuple[int, ...] = ()
    fits: bool | None = None
    fits_now: bool | None = None


class JobReport(msgspec.Struct, frozen=True):
    """All ways, and what follows from them."""

    name: str
    rows: tuple[JobRow, ...]
    findings: tuple[Finding, ...]
    price_per_gpu_hour: float | None = None


def job_report(job: JobConfig, samples: Sequence[GpuSample], price_per_gpu_hour: float | None = None) -> JobReport:
    """Reads the shape of the job's data; raises `JobFileError` where that is amiss.

    The cards are those that can be read, of which the job file may name some.
    """
    data = job.data_shape()
    cards = _cards(job, samples)
    rows = tuple(_row(each, n_gpus, data, cards) for n_gpus in COUNTS for each in _modes(job, n_gpus, data))
    return JobReport(job.name, rows, tuple(_recommended(job, rows, cards, data)), price_per_gpu_hour)


def _cards(job: JobConfig, samples: Sequence[GpuSample]) -> list[GpuSample]:
    """Those the job may have, the one with most free memory first."""
    named = job.launch.gpus
    kept = [sample for sample in samples if sample.healthy and (isinstance(named, str) or sample.index in named)]
    return sorted(kept, key=lambda sample: (-(sample.memory_free_bytes or 0), sample.index))


def _modes(job: JobConfig, n_gpus: int, data: DataShape) -> Iterator[JobConfig]:
    """The job in every mode in which so many GPUs can share it."""
    if n_gpus == 1:
        yield job.replace("parallel", mode="single")
        return
    yield job.replace("parallel", mode="ddp")
    if OPTIMIZERS[job.train.optimizer].steps_alone and n_gpus <= job.sae.width(data.d_in):
        yield job.replace("parallel", mode="tensor")
        if job.parallel.latent_ranks < n_gpus and n_gpus % job.parallel.latent_ranks == 0:
            yield job.replace("parallel", mode="hybrid")


def _row(job: JobConfig, n_gpus: int, data: DataShape, cards: Sequence[GpuSample]) -> JobRow:
    needed = memory.estimate(job, data.d_in, n_gpus, d_out=data.d_out).total
    taken = cards[:n_gpus]
    if len(taken) < n_gpus or any(card.memory_total_bytes is None for card in taken):
        return JobRow(n_gpus, job.parallel.mode, needed)
    return JobRow(
        n_gpus,
        job.parallel.mode,
        needed,
        gpus=tuple(sorted(card.index for card in taken)),
        fits=all(needed <= (card.memory_total_bytes or 0) for card in taken),
        fits_now=all(needed <= (card.memory_free_bytes or 0) for card in taken),
    )


def _recommended(
    job: JobConfig, rows: Sequence[JobRow], cards: Sequence[GpuSample], data: DataShape
) -> Iterator[Finding]:
    """The fewest GPUs that hold the job now, else what would make it fit."""
    least = min(rows, key=lambda row: (not row.fits_now, not row.fits, row.n_gpus, row.memory_bytes))
    needs = f"{plural(least.n_gpus, 'GPU')} as {least.mode}, {gigabytes(least.memory_bytes)} on each"
    chosen = ",".join(map(str, least.gpus))
    if not cards:
        sentence = f"there is no GPU for it here; it would take {needs}"
        yield Finding("note", "job", sentence, "launch it on the CPU with --gpus cpu")
    elif least.fits_now:
        yield Finding("ok", "job", f"it fits on {needs}: --gpus {chosen}")
    elif least.fits:
        sentence = f"it fits on {needs}, but not beside what is on {_named(least.gpus)} now"
        yield Finding("warning", "job", sentence, f"launch it with --gpus {chosen}, which waits for other jobs")
    else:
        yield _too_large(job, rows, cards, data)


def _too_large(job: JobConfig, rows: Sequence[JobRow], cards: Sequence[GpuSample], data: DataShape) -> Finding:
    here = [row for row in rows if row.gpus] or rows
    least = min(here, key=lambda row: row.memory_bytes)
    room = min(card.memory_total_bytes or 0 for card in cards[: least.n_gpus])
    sentence = (
        f"it takes at least {gigabytes(least.memory_bytes)} per GPU ({plural(least.n_gpus, 'GPU')} as {least.mode}), "
        f"of {gigabytes(room)} that a GPU has"
    )
    changed = job.replace("parallel", mode=least.mode)
    cures = memory.remedies(changed, data.d_in, least.n_gpus, room, data.d_out)
    remedy = f"it fits with {' or '.join(cures)}" if cures else "lower train.batch_size or sae.d_sae"
    return Finding("error", "job", sentence, remedy)


def _named(indices: Sequence[int]) -> str:
    return listed([f"GPU {index}" for index in indices])

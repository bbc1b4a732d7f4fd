"""Recommends how to run a job on this machine, and reports how reliable the time estimates are.

Time and modes are forecast only for training jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from sae_tui.doctor.base import Finding
from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.placement import propose_here, recommend
from sae_tui.jobs.launch.ways import Way, fewest, gpus_for, job_rows, larger, paying_more, why_not_more
from trainer.contract.errors import Problem, errors
from trainer.contract.paths import DataDir
from trainer.contract.planning import memory
from trainer.contract.planning.check_job import Proposal, chosen_indices
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.planning.workload import Workload, with_model_gpus
from trainer.contract.settings.job import AnyJob, JobConfig
from trainer.contract.settings.sources import DataShape
from trainer.contract.wording import duration, gibibytes, join_words, plural


class JobReport(msgspec.Struct, frozen=True):
    """All ways to run a job, and the findings about them."""

    name: str
    rows: tuple[Way, ...]
    findings: tuple[Finding, ...]
    price_per_gpu_hour: float | None = None


def job_report(
    job: JobConfig,
    samples: Sequence[GpuSample],
    price_per_gpu_hour: float | None = None,
    *,
    speeds: MeasuredHardware | None = None,
    cuda: bool = True,
    busy: Collection[int] = (),
    refusal: Callable[[AnyJob], Problem | None] = lambda _: None,
) -> JobReport:
    """Report all ways to run a job on these GPUs; raise `JobFileError` if its data cannot be read.

    `cuda` is False for simulated GPUs; `busy` contains the indices of the GPUs in use. GPUs for which `refusal` returns
    a problem are left out, because the job cannot be launched on them.
    """
    data = job.data_shape()
    rows = job_rows(job, data, samples, speeds or MeasuredHardware(), price_per_gpu_hour, cuda=cuda, busy=busy)
    gpus = {row.gpus for row in rows if row.gpus}
    refused = {one: problem for one in gpus if (problem := refusal(job.replace("launch", gpus=list(one))))}
    allowed = tuple(row for row in rows if row.gpus not in refused)
    speed = _speeds(rows, gpus_for(job, samples), cuda)
    if refused and not any(row.gpus for row in allowed):
        return JobReport(job.name, (), (speed, _finding_of(refused[min(refused, key=len)])), price_per_gpu_hour)
    return JobReport(job.name, allowed, (speed, _recommend(job, allowed, data)), price_per_gpu_hour)


def report_without_forecast(job: AnyJob, choices: Sequence[GpuChoice], data: DataDir, *, cuda: bool) -> JobReport:
    """Report what would prevent a non-training job from running, and the GPUs on which it can start now."""
    proposal = propose_here(job, choices, data, cuda=cuda)
    problems = proposal.problems()
    findings = [_finding_of(problem) for problem in problems]
    return JobReport(job.name, (), (*findings, *([] if errors(problems) else [_start(proposal, choices)])))


def _finding_of(problem: Problem) -> Finding:
    sentence, _, remedy = str(problem).partition("; ")
    return Finding(problem.severity, "job", sentence, remedy)


def _start(proposal: Proposal[AnyJob], choices: Sequence[GpuChoice]) -> Finding:
    """Report where the job can start now, or that it has to wait."""
    job, look = proposal.job, proposal.outlook
    if job.cluster:
        return Finding("ok", "job", f"{job.cluster} chooses its devices")
    if job.on_cpu:
        return Finding("ok", "job", f"it runs on the CPU: --gpus {job.launch.gpus}")
    if not choices:
        return Finding("note", "job", "this machine has no GPU for it, so it runs on the CPU")
    named = chosen_indices(job)
    offered = [_shared(one) if job.launch.share else one for one in choices if not named or one.index in named]
    advice, needs = recommend(offered, look.needs_bytes or 0, look.ranks), launch_kind(job.kind).needs(look)
    if advice.shortfall:
        flag = f"--gpus {','.join(map(str, named)) if named else f'auto:{look.ranks}'}"
        return Finding("warning", "job", f"{needs}; {advice.shortfall}", f"launch it with {flag}, which waits for GPUs")
    return Finding("ok", "job", f"{needs}; it can start now with --gpus {','.join(map(str, advice.gpus))}")


def _shared(choice: GpuChoice) -> GpuChoice:
    """Return a GPU as seen by a job that shares GPUs: a GPU in use counts as available."""
    return msgspec.structs.replace(choice, state="available") if choice.state == "busy" else choice


def _speeds(rows: Sequence[Way], gpus: Sequence[GpuSample], cuda: bool) -> Finding:
    """Report whether the time estimates use speeds measured here."""
    assumed = list(dict.fromkeys(row.ranks for row in rows if not row.is_measured and row.fits is not None))
    if not assumed:
        return Finding("ok", "speeds", "time estimates use speeds measured on this machine")
    *fewer, most = assumed
    on = join_words([*map(str, fewer), _devices(most, bool(gpus))])
    source = "published specifications of these GPUs" if gpus and cuda else "the speed of a typical core"
    sentence = f"time estimates for {on} use {source}"
    measure = (
        "`sae-tui doctor --probe` measures the speeds, and so does" if len(gpus) > 1 else "the speeds are measured by"
    )
    return Finding("note", "speeds", sentence, f"{measure} every job at its start")


def _recommend(job: JobConfig, rows: Sequence[Way], data: DataShape) -> Finding:
    """Recommend the smallest number of devices on which the job fits and the largest worthwhile number, or a remedy."""
    best = fewest(rows)
    needs = f"{_named(best)}, {gibibytes(best.memory_bytes)}{' on each' if best.ranks > 1 else ''}"
    if not best.fits:
        return _too_large(job, rows, data)
    if not best.fits_now:
        used = (
            f"the current use of {join_words([f'GPU {index}' for index in best.gpus])}"
            if best.gpus
            else "other programs"
        )
        sentence = f"it fits on {needs}, but not now, because of {used}"
        wait = "which waits for the other jobs" if best.gpus else "when enough memory is free"
        return Finding("warning", "job", sentence, f"launch it with {_flag(best)}, {wait}")
    if not best.n_gpus and not job.on_cpu:
        alone = memory.estimate(Workload(job.replace("parallel", mode="single"), 1, data)).total
        sentence = f"this machine has no GPU for it; on a GPU it would need {gibibytes(alone)}"
        remedy = f"launch it on the CPU with {_flag(best)}, about {duration(best.seconds)}"
        return Finding("note", "job", sentence, remedy)
    parts = [f"it fits on {needs}, about {duration(best.seconds)}: {_flag(best)}", *_more(best, rows)]
    return Finding("ok", "job", "; ".join(parts))


def _more(best: Way, rows: Sequence[Way]) -> Iterator[str]:
    """Yield sentences about the largest worthwhile number of devices, or why no larger number is worthwhile."""
    if row := paying_more(best, rows):
        yield f"{_named(row)} take {duration(row.seconds)}, {row.speed_up:.1f}× the speed of one: {_flag(row)}"
    elif others := larger(best, rows):
        reason = others[0].reason
        yield f"more are not worth it: {why_not_more(best, rows)}{f' ({reason})' if reason else ''}"


def _too_large(job: JobConfig, rows: Sequence[Way], data: DataShape) -> Finding:
    """Report that the job does not fit in any configuration, and which settings would make it fit."""
    here = [row for row in rows if row.room_bytes is not None] or list(rows)
    least = min(here, key=lambda row: row.memory_bytes)
    each, capacity = ("GPU" if least.n_gpus else "process"), least.room_bytes or 0
    sentence = (
        f"it needs at least {gibibytes(least.memory_bytes)} per {each} ({_named(least)}), "
        f"but a {each} has {gibibytes(capacity)}"
    )
    colocated = with_model_gpus(job, least.ranks, 0)
    work = Workload(colocated.replace("parallel", mode=least.mode), least.ranks, data)
    cures = memory.remedies(work, capacity) if least.n_gpus else []
    remedy = f"it fits with {' or '.join(cures)}" if cures else "lower train.batch_size or sae.d_sae"
    return Finding("error", "job", sentence, remedy)


def _named(row: Way) -> str:
    """Return the devices in words and, if there are several, the mode, like `4 GPUs as tensor` or `1 GPU`."""
    devices = _devices(row.ranks, bool(row.n_gpus))
    return devices if row.ranks == 1 else f"{devices} as {row.mode}"


def _devices(ranks: int, on_gpus: bool) -> str:
    return plural(ranks, "GPU" if on_gpus else "CPU process")


def _flag(row: Way) -> str:
    """Return the command-line option for choosing these devices."""
    if row.n_gpus:
        return f"--gpus {','.join(map(str, row.gpus))}"
    return "--gpus cpu" if row.ranks == 1 else f"--gpus cpu:{row.ranks}"

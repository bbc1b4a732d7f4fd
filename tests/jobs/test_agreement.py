"""Tests that review, checks, queue, doctor and ranks agree on a job's mode and memory, and on whether it can run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.workloads import look_of

from sae_tui.gpu.base import GpuSample
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.launch import job_form
from sae_tui.jobs.launch.launching import fields_of
from sae_tui.jobs.launch.placement import Placement, machine, place, propose_here
from sae_tui.jobs.launch.ways import job_rows
from sae_tui.jobs.queue.order import QueueGpu, turns
from trainer.contract.errors import JobFileError, errors
from trainer.contract.paths import DataDir
from trainer.contract.planning.check_job import check
from trainer.contract.planning.choose_mode import PlannedResources, settle
from trainer.contract.planning.hardware import MeasuredHardware, assumed_speeds
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job, to_table
from trainer.contract.store.rows import Job
from trainer.contract.wording import gibibytes

GIB = 2**30
MODES = ("auto", "auto", "ddp", "tensor", "hybrid")


class Asked(NamedTuple):
    """A job, a machine's GPUs as (total bytes, free bytes), and whether the GPUs are real."""

    job: JobConfig
    gpus: tuple[tuple[int, int], ...]
    cuda: bool

    @property
    def choices(self) -> list[GpuChoice]:
        return [
            GpuChoice(index, f"GPU-{index}", "RTX 3090", total, free, "available")
            for index, (total, free) in enumerate(self.gpus)
        ]

    @property
    def samples(self) -> list[GpuSample]:
        return [
            GpuSample(index, f"GPU-{index}", "RTX 3090", 0.0, memory_total_bytes=total, memory_used_bytes=total - free)
            for index, (total, free) in enumerate(self.gpus)
        ]


@st.composite
def asked(draw) -> Asked:
    ranks = draw(st.sampled_from((1, 2, 3, 4)))
    sizes = st.tuples(st.integers(1, 80), st.floats(0.05, 1.0)).map(
        lambda pair: (pair[0] * GIB, int(pair[0] * pair[1] * GIB))
    )
    raw = {
        "data": {"source": "synthetic", "d_in": 512},
        "sae": {"d_sae": draw(st.sampled_from((512, 16384, 300_000, 1_500_000, 6_000_000))), "k": 16},
        "train": {"batch_size": draw(st.sampled_from(("auto", 256, 4096))), "n_steps": 10},
        "parallel": {"mode": draw(st.sampled_from(MODES)), "latent_ranks": ranks},
        "launch": {"gpus": list(range(ranks))},
    }  # fmt: skip
    job, problems = parse_job(raw)
    assert job, problems
    return Asked(job, tuple(draw(st.lists(sizes, min_size=ranks, max_size=ranks))), draw(st.booleans()))


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(asked())
def test_review_checks_queue_doctor_and_ranks_agree_on_a_job(tmp_path, asked: Asked) -> None:
    job, data, shape, ranks = asked.job, DataDir(tmp_path), asked.job.data_shape(), len(asked.gpus)
    here = msgspec.structs.replace(machine(asked.choices, data, cuda=asked.cuda), cuda_problem="")
    look = look_of(job, shape, here)
    problems = [problem for problem in check(job, here) if re.search(r" GiB |needs ", problem.message)]

    # Check the review and its memory bar.
    review = job_form.review(
        job_form.Draft(job_form.flatten(to_table(job)), {}, job.launch.gpus), asked.choices, data, [], cuda=asked.cuda
    )
    assert review.need.rank_bytes == review.needed_bytes == look.needs_bytes == review.need.parts.total
    assert f", {look.mode} · " in review.summary
    assert f"needs {gibibytes(look.needs_bytes)}" in review.summary
    # If the GPUs are real but torch has no CUDA support, the review reports only this problem.
    assert asked.cuda or {problem for problem in problems if problem.path != "--data-dir"} <= set(review.problems)

    # Check the doctor's answer for the same number of these GPUs.
    rows = job_rows(job, shape, asked.samples, MeasuredHardware(), cuda=asked.cuda)
    (row,) = [row for row in rows if row.chosen and row.n_gpus == ranks] if ranks != 3 else [None]
    if row:
        assert (row.mode, row.memory_bytes) == (look.mode, look.needs_bytes)
        assert (row.fits, row.fits_now) == (not look.excess, not look.lack)

    # Check the job and its launch.
    smallest, fullest = min(total for total, _ in asked.gpus), min(free for _, free in asked.gpus)
    assert bool(look.excess) == (look.needs_bytes > smallest)
    assert bool(look.lack) == (look.needs_bytes > fullest)
    if look.excess:
        assert [problem.path for problem in errors(problems) if problem.path != "--data-dir"]
        with pytest.raises(JobFileError):
            place(propose_here(job, asked.choices, data, cuda=asked.cuda), asked.choices)
        return
    placed = place(propose_here(job, asked.choices, data, cuda=asked.cuda), asked.choices)
    row = queued(data, job, placed)
    assert row.card_memory_bytes == look.needs_bytes
    assert row.mode == look.mode or ranks == 1
    assert starts(row, [free for _, free in asked.gpus]) == (not look.lack)
    assert starts(row, [total for total, _ in asked.gpus])

    # After a resume, only the memory that the job had on its GPUs is known.
    again = queued(data, job, msgspec.structs.replace(placed, look=None, had_bytes=row.card_memory_bytes))
    assert again.card_memory_bytes <= row.card_memory_bytes

    # Check the ranks on GPUs with exactly the free memory that the job waited for.
    own = settle(
        Workload(job, ranks, shape), PlannedResources(assumed_speeds("RTX 3090", "bf16"), row.card_memory_bytes)
    )
    assert own.fits
    assert own.needs_bytes <= row.card_memory_bytes


def queued(data: DataDir, job: JobConfig, placed: Placement) -> Job:
    fields = fields_of(data, job, placed, [])
    return Job(id=1, name="a", user="ada", host="box", gpu_source="nvml", **fields)


def starts(row: Job, free: list[int]) -> bool:
    gpus = [QueueGpu(index, f"GPU-{index}", free_bytes=n_bytes) for index, n_bytes in enumerate(free)]
    return bool(turns([row], gpus, 0.0)[1].gpus)


GPUS = (GpuChoice(0, "GPU-0", "RTX 3090", 24 * GIB, 23 * GIB, "available"),
        GpuChoice(1, "GPU-1", "RTX 3090", 24 * GIB, 23 * GIB, "available"),
        GpuChoice(2, "GPU-2", "RTX 3080", 10 * GIB, 9 * GIB, "available"),
        GpuChoice(3, "GPU-3", "RTX 3090", 24 * GIB, 2 * GIB, "busy", None, "used by mallory"))  # fmt: skip


def problems_of(gpus, mode: str = "auto", d_sae: int = 1_500_000) -> list[str]:
    raw = {
        "data": {"source": "synthetic", "d_in": 384},
        "sae": {"d_sae": d_sae, "k": 32},
        "train": {"batch_size": 1024, "n_steps": 10, "state": "fp32"},
        "parallel": {"mode": mode},
        "launch": {"gpus": gpus},
    }
    job, _ = parse_job(raw)
    problems = check(job, msgspec.structs.replace(machine(GPUS, DataDir(Path("/tmp")), cuda=False), cuda_problem=""))
    return [f"{problem.severity}: {problem}" for problem in problems if problem.path != "--data-dir"]


def test_if_a_gpu_is_too_small_the_problem_names_the_setting_the_gpu_and_a_remedy() -> None:
    assert problems_of([0, 1, 2], d_sae=1_300_000) == []
    (problem,) = problems_of([0, 1, 2], "ddp")
    assert problem.startswith(
        "error: sae.d_sae: needs 14.4 GiB on each of 3 GPUs, and GPU 2 has 10.0 GiB in total; it fits "
    )
    assert 'with parallel.mode = "tensor", or choose larger GPUs' in problem


def test_too_little_free_memory_is_reported_with_the_gpu_and_both_amounts() -> None:
    busy, problem = problems_of([3], d_sae=600_000)
    assert busy == "warning: launch.gpus: GPU 3 is busy: used by mallory"
    assert problem.startswith("warning: launch.gpus: GPU 3 has 2.0 GiB free of ")


@pytest.mark.parametrize(
    ("gpus", "mode", "d_sae", "said"),
    [
        ("auto:3", "auto", 1_300_000, ""),
        ("auto:3", "ddp", 1_500_000, "warning: launch.gpus: 2 of 4 GPUs are free and have the 14.4 GiB "),
        ("auto:4", "ddp", 1_500_000, "error: sae.d_sae: needs 13.6 GiB on each of 4 GPUs, and only 3 of 4 have"),
        ("auto", "auto", 3_000_000, "error: sae.d_sae: needs 43.8 GiB, and the largest has 24.0 GiB"),
    ],
)  # fmt: skip
def test_choosing_any_gpus_is_impossible_if_too_few_are_large_enough(gpus, mode, d_sae, said) -> None:
    problems = problems_of(gpus, mode, d_sae)
    assert bool(problems) == bool(said)
    assert not said or problems[0].startswith(said)


def test_a_full_gpu_without_processes_is_not_expected_to_become_free_soon() -> None:
    (problem,) = problems_of([2], d_sae=530_000)
    assert ", although no process is using it; " in problem

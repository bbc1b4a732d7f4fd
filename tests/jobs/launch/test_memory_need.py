"""Tests for how much memory a job needs, how much similar jobs used, and whether enough memory is free."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.workloads import look_of, workload

from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.launch.kinds.training import LaunchTraining
from sae_tui.jobs.launch.memory_need import (
    FreeMemory,
    Need,
    PeakMemory,
    capacity_on_cpu,
    capacity_on_gpus,
    measured_peak,
)
from sae_tui.jobs.launch.placement import machine
from trainer.contract.paths import DataDir
from trainer.contract.planning import memory
from trainer.contract.planning.forecast import UNKNOWN_MEMORY, DeviceMemory
from trainer.contract.planning.memory import PROCESS_BYTES, outside_pytorch
from trainer.contract.planning.outlook import Outlook, outlook
from trainer.contract.settings.job import JobConfig, SweepAxis
from trainer.contract.settings.job_file import dump_job
from trainer.contract.settings.sources import DataShape
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import gibibytes

GIB = 2**30
DATA = DataShape(8, None, 100_000)


@pytest.fixture
def config(box) -> JobConfig:
    return box.config()


def done(job: JobConfig, **fields) -> Job:
    """Return a finished job that ran on two GPUs."""
    defaults = {
        "config": dump_job(job),
        "state": JobState.FINISHED,
        "device": "cuda",
        "world_size": 2,
        "d_in": 8,
        "mode": "ddp",
    }
    defaults |= {
        "name": "a",
        "user": "ann",
        "host": "box",
        "gpu_source": "nvml",
        "peak_memory_bytes": 3 * GIB,
        "id": 41,
    }
    return Job(**(defaults | fields))


def choice(index: int, free: int | None) -> GpuChoice:
    return GpuChoice(index, f"GPU-{index}", "RTX 3090", 24 * GIB, free, "available")


def found(config: JobConfig, *past: Job, device: str = "cuda") -> PeakMemory | None:
    return measured_peak(config, DATA, 2, "ddp", device, past)


def on_gpus(config: JobConfig, *free: int | None, past=(), cuda: bool = True) -> Outlook:
    """Return the forecast for a job on GPUs with 24 GiB each; `free` lists their free bytes."""
    gpus = [choice(index, one) for index, one in enumerate(free)]
    box = msgspec.structs.replace(machine(gpus, DataDir(Path("/nowhere")), cuda=cuda), cuda_problem="")
    return look_of(config.replace("launch", gpus=list(range(len(free)))), DATA, box, past)


def on_cpu(config: JobConfig, host: DeviceMemory = UNKNOWN_MEMORY) -> Outlook:
    return outlook(config.replace("launch", gpus="cpu:2"), DATA, 2, (), host=host)


def test_the_newest_finished_job_with_the_same_shape_provides_the_measured_memory(config):
    renamed = msgspec.structs.replace(config.replace("train", seed=7, n_steps=99), name="again")
    past = [done(renamed, id=42, peak_memory_bytes=2 * GIB), done(config)]
    assert found(config, *past) == PeakMemory(42, 2 * GIB, "cuda")
    assert str(found(config, done(config))) == "measured 3.0 GiB in job 41, without the CUDA context"


@pytest.mark.parametrize(
    "other",
    [
        {"state": JobState.STOPPED},
        {"state": JobState.FAILED},
        {"peak_memory_bytes": None},
        {"d_in": None},
        {"d_in": 16},
        {"d_out": 8},
        {"world_size": 4},
        {"device": "cpu"},
        {"mode": "tensor"},
        {"config": ""},
        {"config": "[sae"},
    ],
)
def test_a_job_with_a_different_outcome_or_environment_provides_no_measurement(config, other):
    assert found(config, done(config, **other)) is None


@pytest.mark.parametrize(
    ("section", "changes"),
    [
        ("sae", {"architecture": "batch_topk"}),
        ("sae", {"d_sae": 32}),
        ("train", {"batch_size": 32}),
        ("train", {"accumulate": 2}),
        ("train", {"precision": "fp32"}),
        ("train", {"optimizer": "muon"}),
        ("parallel", {"mode": "tensor"}),
    ],
)
def test_a_job_with_a_different_shape_provides_no_measurement(box, config, section, changes):
    assert found(config.replace(section, **changes), done(config)) is None


def test_a_sweep_and_its_first_sae_have_different_shapes(config):
    sweep = msgspec.structs.replace(config, sweep=(SweepAxis("train.seed", (0, 1)),))
    assert found(sweep, done(config)) is None
    assert found(sweep, done(sweep)) is not None


def test_a_gpu_job_needs_the_measured_memory_if_it_exceeds_the_estimate(config):
    look = on_gpus(config, 23 * GIB, 20 * GIB, past=[done(config)])
    takes = LaunchTraining().need(config, look, FreeMemory(20 * GIB, "GPU 1"), device="cuda", past=[done(config)])
    assert takes.parts == memory.estimate(workload(config, 8, 2, n_tokens=DATA.n_tokens))
    assert takes.rank_bytes == look.needs_bytes == 3 * GIB + outside_pytorch(workload(config, 8, 2))
    assert look.problems(config) == []
    less = on_gpus(config, 23 * GIB, 20 * GIB, past=[done(config, peak_memory_bytes=2**14)])
    assert less.needs_bytes == takes.parts.total


def test_a_job_does_not_wait_for_measured_memory_that_may_never_be_free(config):
    look = on_gpus(config, 3 * GIB, 23 * GIB, past=[done(config)])
    assert look.needs_bytes == memory.estimate(workload(config, 8, 2, n_tokens=DATA.n_tokens)).total
    (problem,) = look.problems(config)
    assert (problem.path, problem.severity) == ("launch.gpus", "warning")
    assert problem.message == "a GPU has only 3.0 GiB free, but job 41 of the same shape used 3.8 GiB per GPU"


def test_the_measured_memory_of_a_process_includes_its_libraries(config):
    past = [done(config, device="cpu")]
    look = on_cpu(config)
    takes = LaunchTraining().need(config, look, FreeMemory(2 * GIB, "this machine"), device="cpu", past=past)
    assert str(takes.measured) == "measured 3.0 GiB in job 41, libraries included"
    assert (
        takes.rank_bytes
        == takes.parts.total
        == memory.estimate(workload(config, 8, 2, n_tokens=DATA.n_tokens, device="cpu")).total
    )
    assert takes.parts.context == PROCESS_BYTES
    assert not takes.judged_lacking


def test_processes_share_the_machines_memory_but_gpus_have_their_own(config):
    def of(look: Outlook) -> Need:
        return LaunchTraining().need(config, look, FreeMemory(), device="cpu")

    on_both, on_one = of(on_cpu(config)), of(on_gpus(config, 9 * GIB, 9 * GIB))
    one = on_both.rank_bytes
    assert on_both.lacks(FreeMemory(2 * one - 1))
    assert not on_both.lacks(FreeMemory(2 * one))
    assert not on_one.lacks(FreeMemory(on_one.rank_bytes))
    assert not on_one.lacks(FreeMemory(None))


def test_too_little_free_memory_is_a_warning_and_too_little_total_memory_an_error(config):
    config = config.replace("parallel", mode="ddp")
    one = on_cpu(config).needs_bytes
    (problem,) = on_cpu(config, DeviceMemory(2 * one - 1, 2 * one)).problems(config)
    assert (problem.path, problem.severity) == ("launch.gpus", "warning")
    assert problem.message.startswith("this machine has ")
    (problem,) = on_cpu(config, DeviceMemory(one, 2 * one - 1)).problems(config)
    assert (problem.path, problem.severity) == ("train.batch_size", "error")
    assert " for 2 processes, and this machine has " in problem.message


def test_a_job_that_does_not_fit_in_memory_is_offered_settings_that_make_it_fit(config):
    wide = config.replace("sae", d_sae=4096).replace("train", batch_size=65536).replace("parallel", mode="ddp")
    free = memory.estimate(workload(wide.replace("train", batch_size=16384), 8, 2, n_tokens=DATA.n_tokens)).total
    look = on_gpus(wide, free, 23 * GIB)
    takes = LaunchTraining().need(wide, look, FreeMemory(free, "GPU 0"), device="cuda")
    assert takes.judged_lacking
    assert "train.batch_size = 16384" in takes.remedies
    (problem,) = look.problems(wide)
    assert f"GPU 0 has {gibibytes(free)} free of {gibibytes(takes.rank_bytes)} needed" in problem.message
    assert "train.batch_size = 16384" in problem.message


def test_the_available_memory_is_that_of_the_fullest_chosen_gpu():
    gpus = [choice(0, 9 * GIB), choice(1, 5 * GIB), choice(2, GIB), choice(3, None)]
    assert capacity_on_gpus(gpus, [0, 1]) == FreeMemory(5 * GIB, "GPU 1")
    assert capacity_on_gpus(gpus, [0, 3]) == FreeMemory(9 * GIB, "GPU 0")
    assert capacity_on_gpus(gpus, [3]) == capacity_on_gpus(gpus, []) == FreeMemory()


def test_this_machines_free_memory_is_known():
    assert capacity_on_cpu().free_bytes > 2**20

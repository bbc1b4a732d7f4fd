"""What a job takes of memory, what jobs of its shape took, and whether that is there."""

from __future__ import annotations

import msgspec
import pytest

from sae_tui.jobs.availability import GpuChoice
from sae_tui.jobs.need import Measured, Need, Room, measured, need, room_on_cpu, room_on_gpus
from trainer.contract import memory
from trainer.contract.config import dump_job
from trainer.contract.job import Axis, JobConfig
from trainer.contract.memory import CUDA_CONTEXT_BYTES
from trainer.contract.records import Job
from trainer.contract.source_knobs import DataShape
from trainer.contract.states import JobState

GB = 2**30
DATA = DataShape(8, None, 100_000)


@pytest.fixture
def config(box) -> JobConfig:
    return box.config()


def done(job: JobConfig, **fields) -> Job:
    """A job of two GPUs that has finished."""
    known = {"config": dump_job(job), "state": JobState.FINISHED, "device": "cuda", "world_size": 2, "d_in": 8}
    known |= {"name": "a", "user": "ann", "host": "box", "gpu_source": "nvml", "peak_memory_bytes": 3 * GB, "id": 41}
    return Job(**(known | fields))


def choice(index: int, free: int | None) -> GpuChoice:
    return GpuChoice(index, f"GPU-{index}", "RTX 3090", 24 * GB, free, "available")


def found(config: JobConfig, *past: Job, device: str = "cuda") -> Measured | None:
    return measured(config, DATA, 2, device, past)


def test_the_newest_finished_job_of_the_same_shape_tells_what_it_took(config):
    renamed = msgspec.structs.replace(config.replace("train", seed=7, n_steps=99), name="again")
    past = [done(renamed, id=42, peak_memory_bytes=2 * GB), done(config)]
    assert found(config, *past) == Measured(42, 2 * GB, "cuda")
    assert str(found(config, done(config))) == "measured 3.0 GB in job 41, without the CUDA context"


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
        {"config": ""},
        {"config": "[sae"},
    ],
)
def test_a_job_that_did_not_end_well_or_ran_elsewhere_tells_nothing(config, other):
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
def test_a_job_of_another_shape_tells_nothing(box, config, section, changes):
    assert found(config.replace(section, **changes), done(config)) is None


def test_a_sweep_is_of_another_shape_than_its_first_sae(config):
    sweep = msgspec.structs.replace(config, sweep=(Axis("train.seed", (0, 1)),))
    assert found(sweep, done(config)) is None
    assert found(sweep, done(sweep)) is not None


def test_on_a_gpu_a_job_needs_what_was_measured_where_that_is_more_than_estimated(config):
    takes = need(config, DATA, 2, Room(3 * GB, "GPU 1"), on_gpus=True, device="cuda", past=[done(config)])
    assert takes.parts == memory.estimate(config, 8, 2)
    assert takes.rank_bytes == 3 * GB + CUDA_CONTEXT_BYTES
    assert takes.lacks(Room(3 * GB, "GPU 1"))
    # By the estimate it fits as it is, so that no setting is known to help.
    assert takes.remedies == ()
    less = need(config, DATA, 2, Room(), on_gpus=True, device="cuda", past=[done(config, peak_memory_bytes=2**14)])
    assert less.rank_bytes == less.parts.total


def test_the_size_of_a_process_is_told_but_not_counted_on(config):
    past = [done(config, device="cpu")]
    takes = need(config, DATA, 2, Room(GB, "this machine"), on_gpus=False, device="cpu", past=past)
    assert str(takes.measured) == "measured 3.0 GB in job 41, libraries included"
    assert takes.rank_bytes == takes.parts.total == memory.estimate(config, 8, 2, device="cpu").total
    assert not takes.judged_lacking


def test_all_processes_share_the_memory_of_the_machine_and_gpus_do_not(config):
    def of(*, on_gpus: bool) -> Need:
        return need(config, DATA, 2, Room(), on_gpus=on_gpus, device="cpu")

    one = of(on_gpus=False).rank_bytes
    assert of(on_gpus=False).lacks(Room(2 * one - 1))
    assert not of(on_gpus=False).lacks(Room(2 * one))
    assert not of(on_gpus=True).lacks(Room(of(on_gpus=True).rank_bytes))
    assert not of(on_gpus=True).lacks(Room(None))


def test_a_job_that_does_not_fit_is_told_which_settings_make_it_fit(config):
    wide = config.replace("sae", d_sae=4096).replace("train", batch_size=65536)
    free = memory.estimate(wide.replace("train", batch_size=16384), 8, 2).total
    takes = need(wide, DATA, 2, Room(free, "GPU 0"), on_gpus=True, device="cuda")
    assert takes.judged_lacking
    assert "train.batch_size = 16384" in takes.remedies


def test_the_room_is_that_of_the_fullest_chosen_gpu():
    cards = [choice(0, 9 * GB), choice(1, 5 * GB), choice(2, GB), choice(3, None)]
    assert room_on_gpus(cards, [0, 1]) == Room(5 * GB, "GPU 1")
    assert room_on_gpus(cards, [0, 3]) == Room(9 * GB, "GPU 0")
    assert room_on_gpus(cards, [3]) == room_on_gpus(cards, []) == Room()


def test_this_machine_has_room():
    assert room_on_cpu().free_bytes > 2**20

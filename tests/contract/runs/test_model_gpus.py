"""Tests for GPUs that run only the language model. Every rank reads the number of these GPUs from its spec."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.workloads import stream_of_model

from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.runs.model_gpus import with_model_placed
from trainer.contract.runs.rank_spec import RankSpec, rank_environment, read_spec, threads_per_rank, write_spec
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job

UUIDS = tuple(f"GPU-{index}" for index in range(4))


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    data = stream_of_model(tmp_path)
    job, problems = parse_job({"data": data, "train": {"n_tokens": 10**6}, "launch": {"gpus": "auto:4"}})
    assert job, problems
    return job


@pytest.fixture
def given(tmp_path: Path) -> RankSpec:
    """Return the spec of an attempt with one rank per device."""
    return RankSpec(
        tmp_path, tmp_path / "sae", attempt=1, world_size=4, device="cuda", gpu_uuids=UUIDS, gpu_vendor="nvml"
    )


def placed(spec: RankSpec, job: JobConfig, model_gpus: int | str) -> RankSpec:
    settings = msgspec.structs.replace(job.data.settings, model_gpus=model_gpus)
    return with_model_placed(spec, job.replace("data", settings=settings), "", MeasuredHardware(), DeviceMemory())


def test_language_model_gpus_have_no_rank_and_all_gpus_are_pinned(job: JobConfig, given: RankSpec) -> None:
    spec = placed(given, job, 2)
    assert (spec.world_size, spec.n_processes, spec.model_gpus, spec.n_devices) == (2, 2, 2, 4)
    assert read_spec(write_spec(spec)) == spec
    environment = rank_environment(spec, 1, {})
    assert (environment["RANK"], environment["LOCAL_RANK"], environment["WORLD_SIZE"]) == ("1", "1", "2")
    assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(UUIDS)
    assert environment["OMP_NUM_THREADS"] == str(threads_per_rank(2))


@pytest.mark.parametrize(
    ("devices", "model_gpus", "of_ranks"),
    [(4, 2, [[2], [3]]), (4, 3, [[1, 2, 3]]), (8, 6, [[2, 4, 6], [3, 5, 7]]), (4, 0, [[], [], [], []])],
)
def test_each_language_model_gpu_belongs_to_one_rank(
    devices: int, model_gpus: int, of_ranks: list[list[int]], given: RankSpec
) -> None:
    spec = msgspec.structs.replace(given, world_size=devices - model_gpus, model_gpus=model_gpus)
    assert [spec.model_gpus_of(rank) for rank in range(spec.world_size)] == of_ranks


def test_an_automatic_number_of_model_gpus_is_resolved_with_its_reason(job: JobConfig, given: RankSpec) -> None:
    spec = placed(given, job, "auto")
    assert (spec.world_size, spec.model_gpus) == (4, 0)
    assert spec.model_gpus_why.startswith("with ")


def test_a_resumed_run_keeps_its_rank_count(job: JobConfig, given: RankSpec, tmp_path: Path) -> None:
    write_spec(placed(given, job, 2))
    again = msgspec.structs.replace(given, attempt=2, resume_from=tmp_path / "checkpoints" / "step-1")
    assert placed(again, job, "auto").model_gpus == 2
    assert placed(again, job, 3).model_gpus == 3
    assert placed(msgspec.structs.replace(given, attempt=2), job, "auto").model_gpus == 0


def test_the_spec_of_a_job_that_reads_stored_rows_is_not_changed(given: RankSpec) -> None:
    job, _ = parse_job({"data": {"path": "acts"}})
    assert job
    assert with_model_placed(given, job, "", MeasuredHardware(), DeviceMemory()) is given

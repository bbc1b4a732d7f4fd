"""Tests for the resources that an extraction needs, and for the problems reported if one is unavailable."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import msgspec
import pytest
from support.extractions import extraction_job
from support.tiny_models import CONTEXT, D_IN, make_model

from trainer.contract.planning.check_job import Machine, MachineGpu, check
from trainer.contract.planning.extraction import ExtractionProposal, disk_words, outlook_of_extraction
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.hardware import CPU, DeviceSpeeds, MeasuredHardware
from trainer.contract.settings.extract import ExtractJob
from trainer.ranks.device_choice import chosen
from trainer.ranks.devices import Device

GIB = 2**30

ALONE = "a MIG slice cannot be combined with other GPUs"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture
def job(model: Path, tmp_path: Path) -> ExtractJob:
    (tmp_path / "corpus.txt").write_text("the cat sat")
    return extraction_job(model, tmp_path / "corpus.txt", tmp_path / "rows", n_tokens=10**6)


def on(job: ExtractJob, gpus: object) -> ExtractJob:
    return msgspec.structs.replace(job, launch=msgspec.structs.replace(job.launch, gpus=gpus))


def machine(tmp_path: Path, *free_gib: float, cuda: bool = True) -> Machine:
    gpus = tuple(
        MachineGpu(index, "NVIDIA H100", round(free * GIB), memory_total_bytes=80 * GIB)
        for index, free in enumerate(free_gib)
    )
    return Machine(gpus, 2, tmp_path, memory=DeviceMemory(20 * GIB, 24 * GIB), cuda=cuda)


def test_disk_space_is_estimated_from_the_rows_and_time_from_the_matmuls(job: ExtractJob) -> None:
    # The simulated device runs at 1 GFLOP/s.
    box = MeasuredHardware(devices={CPU: DeviceSpeeds({"fp32": 1e9}, 1e9)})
    look = outlook_of_extraction(job, [], speeds=box)
    assert look.d_in == D_IN
    # The output contains fp32 rows from two hooks, each stored with its token, position and document.
    assert look.disk_bytes == 10**6 * 2 * (4 * D_IN + 20)
    int8 = outlook_of_extraction(job.replace("extract", dtype="int8"), [])
    assert int8.disk_bytes == 10**6 * 2 * (D_IN + 2 * -(-D_IN // 64) + 20)
    assert int8.needs_bytes is not None
    assert look.needs_bytes is not None
    assert int8.needs_bytes < look.needs_bytes
    whole = outlook_of_extraction(job, [], speeds=MeasuredHardware(devices={CPU: DeviceSpeeds({"fp32": 2e9}, 1e9)}))
    assert look.seconds == pytest.approx(2 * (whole.seconds or 0))


def test_the_disk_estimate_is_shown_with_the_free_space(job: ExtractJob, tmp_path: Path) -> None:
    look = outlook_of_extraction(job, [])
    assert look.disk_free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    assert re.fullmatch(r"0\.3 GiB of disk, [\d.]+ GiB free", disk_words(look))


def test_more_tokens_per_batch_and_a_longer_context_take_more_memory(model: Path, tmp_path: Path) -> None:
    def needs(**settings: int) -> int:
        look = outlook_of_extraction(extraction_job(model, tmp_path, tmp_path / "rows", **settings), [])
        assert look.needs_bytes
        return look.needs_bytes

    assert needs(batch_tokens=10**6) > 2 * needs(batch_tokens=64)
    assert needs(batch_tokens=4096, context=4096) > needs(batch_tokens=4096, context=32)


def test_a_full_gpu_triggers_a_warning_and_one_that_is_too_small_triggers_an_error(
    job: ExtractJob, tmp_path: Path
) -> None:
    named = on(job, [0])
    needs = (ExtractionProposal(named, machine(tmp_path, 70)).outlook.needs_bytes or 0) / GIB
    assert check(named, machine(tmp_path, 70)) == []
    (lacking,) = check(named, machine(tmp_path, needs / 2))
    assert (lacking.path, lacking.severity) == ("launch.gpus", "warning")
    assert "lower extract.batch_tokens" in lacking.message
    small = Machine((MachineGpu(0, "NVIDIA T4", 10**6, memory_total_bytes=10**7),), 2, tmp_path)
    (fatal,) = [problem for problem in check(named, small) if problem.severity == "error"]
    assert fatal.path == "model.path"


def test_a_model_that_is_not_on_disk_is_launched_without_an_estimate(job: ExtractJob, tmp_path: Path) -> None:
    hub = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, path="gpt2"))
    look = ExtractionProposal(hub, machine(tmp_path, 70)).outlook
    assert (look.needs_bytes, look.seconds, look.disk_bytes) == (None, None, None)
    assert check(hub, machine(tmp_path, 70)) == []


def test_missing_text_and_a_full_disk_are_reported_with_their_settings(model: Path, tmp_path: Path) -> None:
    job = extraction_job(model, tmp_path / "nothing.txt", tmp_path / "rows", n_tokens=10**13)
    problems = {problem.path: problem.message for problem in check(job, machine(tmp_path))}
    assert problems["text.path"] == f"there is nothing at {tmp_path}/nothing.txt"
    assert "has" in problems["extract.n_tokens"]
    assert "free; choose fewer" in problems["extract.n_tokens"]


def test_conflicts_with_the_model_files_are_reported_before_the_launch(job: ExtractJob, tmp_path: Path) -> None:
    beyond = msgspec.structs.replace(job.model, hooks=[*job.model.hooks, "blocks.66.hook_resid_post"])
    (problem,) = check(msgspec.structs.replace(job, model=beyond), machine(tmp_path, 70))
    assert re.fullmatch(r"model.hooks: resid_post.66: the model has blocks 0 to \d; choose one of them", str(problem))
    longer = msgspec.structs.replace(job, text=msgspec.structs.replace(job.text, context=CONTEXT + 1))
    (problem,) = check(longer, machine(tmp_path, 70))
    wanted = f"text.context: must be at most {CONTEXT}, the model's context length, not {CONTEXT + 1}"
    assert str(problem) == wanted
    missing = msgspec.structs.replace(job.model, path="nofile.gguf")
    (problem,) = check(msgspec.structs.replace(job, model=missing), machine(tmp_path, 70))
    assert str(problem) == "model.path: there is nothing at nofile.gguf"


def test_an_invalid_model_or_text_or_folder_is_reported_before_the_launch(tmp_path: Path) -> None:
    (other := tmp_path / "weights.zip").write_bytes(b"")
    told = [str(problem) for problem in check(extraction_job(tmp_path, other, other), machine(tmp_path, 70))]
    assert told == [
        f"text.path: {other} must end in .txt, .md, .rst, .jsonl, .json, .parquet",
        f"model.path: {tmp_path} has no config.json; give the folder of a model, or its .gguf file",
        f"extract.output: {other} is not a folder; choose another",
    ]
    told = [
        str(problem) for problem in check(extraction_job(other, tmp_path, tmp_path / "rows"), machine(tmp_path, 70))
    ]
    assert told == [
        f"model.path: {other} is neither a folder nor a .gguf file; give the folder or file of a model",
        f"extract.output: {tmp_path}/rows is inside text.path, where all files are read as text; choose another",
    ]


def test_spreading_a_model_over_gpus_divides_its_memory_but_is_no_faster_than_one_gpu(
    job: ExtractJob, tmp_path: Path
) -> None:
    whole = on(job, "auto:3")
    spread = msgspec.structs.replace(whole, model=msgspec.structs.replace(whole.model, spread=True))
    each, shared = (ExtractionProposal(one, machine(tmp_path, 70, 70, 70)).outlook for one in (whole, spread))
    assert each.memory
    assert shared.memory
    assert (each.mode, shared.mode) == ("single", "spread")
    # Each GPU holds one of the three blocks, and has space for one more.
    assert shared.memory.weights == pytest.approx(each.memory.weights * 2 / 3, rel=1e-3)
    assert shared.memory.activations == each.memory.activations
    assert (shared.seconds or 0) == pytest.approx(3 * (each.seconds or 0))


@pytest.mark.parametrize(
    ("gpus", "spread", "said"),
    [
        ("auto:2", False, []),
        ([0, 1], False, []),
        (
            "auto:2",
            True,
            [f"asks for 2 GPUs, but this machine has 0 that can be used; {ALONE}"],
        ),
        (
            [0, 1],
            True,
            ["GPU 0 is a MIG slice, and NCCL cannot connect slices; name only one slice, or whole GPUs"],
        ),
    ],
)
def test_processes_may_use_mig_slices_but_a_model_cannot_be_spread_over_slices(
    job: ExtractJob, tmp_path: Path, gpus: object, spread: bool, said: list[str]
) -> None:
    cut = tuple(MachineGpu(index, "H200 MIG 3g.71gb", 70 * GIB, is_slice=True) for index in (0, 1))
    there = msgspec.structs.replace(on(job, gpus), model=msgspec.structs.replace(job.model, spread=spread))
    problems = check(there, Machine(cut, cpu_count=2, output_root=tmp_path))
    assert [one.message for one in problems if one.path == "launch.gpus"] == said
    fewer = said and isinstance(gpus, str)
    slices = [Device(index, f"MIG-{index}", "H200 MIG 3g.71gb", 70 * GIB) for index in (0, 1)]
    assert chosen(there, slices) == ([] if fewer else slices)


def test_a_model_larger_than_one_gpu_may_be_spread_over_several(job: ExtractJob, tmp_path: Path) -> None:
    small = Machine((MachineGpu(0, "NVIDIA T4", 10**6, memory_total_bytes=10**7),), 2, tmp_path)
    (lacking,) = check(on(job, [0]), small)
    assert "set model.spread = true with several GPUs" in lacking.message

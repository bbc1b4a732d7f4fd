"""Tests what `bench` measures and prints, but not the measured speeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from support.combinations import slow_except
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from trainer.cli import main
from trainer.contract.errors import UserError
from trainer.contract.runs.rank_spec import EXIT_FINISHED, EXIT_USAGE, RankSpec, write_spec
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.contract.settings.sources import DataShape
from trainer.measuring import bench_rank
from trainer.measuring.bench import PHASES, bench_job, measure, table
from trainer.measuring.bench_rank import RepeatedStep, floor, measure_steps, phases_ms
from trainer.parallel.base import Parallel
from trainer.runtime import phases, triton_kernels

MakeJob = Callable[..., JobConfig]
CPU = torch.device("cpu")


@pytest.fixture
def single() -> Parallel:
    return Parallel(CPU)


@pytest.fixture
def job_file(make_job: MakeJob, tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(dump_job(make_job(launch={"gpus": "cpu"})))
    return file


@pytest.mark.slow
def test_each_rank_takes_the_same_steps_as_in_a_real_run(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(job_file), "--set", "launch.gpus=cpu:2", "--steps", "3", "--json"]) == EXIT_FINISHED
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["ranks"], report["steps"], report["tokens_per_step"]) == (2, 3, 2 * 128)
    assert (report["d_in"], report["d_sae"], report["architecture"]) == (16, 64, "topk")
    assert list(report["phases_ms"]) == list(PHASES)
    assert all(ms > 0 for ms in report["phases_ms"].values())
    assert report["tokens_per_s"] == pytest.approx(1000 * report["tokens_per_step"] / report["step_ms"])
    assert report["peak_memory_bytes"] > 2**25
    assert not list(Path.cwd().glob("bench-*"))


def event(name: str, start_us: int, end_us: int, thread: int = 1) -> FunctionEvent:
    """Create a profiler event for a phase mark or an operation."""
    is_mark = name.startswith("sae:")
    return FunctionEvent(0, name, thread, start_us, end_us, is_user_annotation=is_mark, device_type=DeviceType.CPU)


def kernel(number: int, started_us: int, took_us: int, thread: int = 1) -> list[FunctionEvent]:
    """Create a kernel's two profiler events: the launch call, and the kernel's later execution on the GPU."""
    call = FunctionEvent(number, "cuLaunchKernelEx", thread, started_us, started_us + 5, device_type=DeviceType.CPU)
    begins = 10_000 + 1000 * number
    return [call, FunctionEvent(number, "_sum_bags", 0, begins, begins + took_us, device_type=DeviceType.CUDA)]


MARKS = [
    *(event(phases.FORWARD, 0, 1000), event(phases.ENCODER, 100, 300), event(phases.BACKWARD, 1000, 1500)),
    *(event(phases.METRICS, 1500, 1600), event(phases.EXCHANGE, 1600, 1601), event(phases.UPDATE, 1601, 2000)),
]


def test_on_a_cpu_phases_are_measured_in_host_time_and_the_encoder_is_counted_once() -> None:
    found = phases_ms([*MARKS, event("aten::mm", 1100, 1200)])
    assert list(found) == list(PHASES)
    assert list(found.values()) == pytest.approx([0.2, 0.8, 0.5, 0.1, 0.001, 0.399])


def test_on_a_gpu_each_phase_includes_the_kernels_launched_in_it_by_any_thread() -> None:
    kernels = [
        *(*kernel(1, 15, 7000), *kernel(2, 155, 90_000), *kernel(3, 1105, 180_000, thread=2)),
        *(*kernel(4, 1805, 3000), *kernel(5, 5005, 1), event("aten::add_", 1700, 1710)),
    ]
    # The GPU trace also contains each phase mark, spanning the phase's first to last kernel.
    # Operation and kernel ids are independent.
    of_gpu = FunctionEvent(2, phases.FORWARD, 0, 11_000, 99_000, is_user_annotation=True, device_type=DeviceType.CUDA)
    operation = FunctionEvent(3, "aten::mm", 1, 1650, 1660, device_type=DeviceType.CPU)
    found = phases_ms([*MARKS, *kernels, of_gpu, operation])
    assert list(found.values()) == pytest.approx([90, 7, 180, 0, 0, 3])


@pytest.mark.parametrize("architecture", slow_except(["topk", "gated"], catalog.ARCHITECTURES))
def test_the_encoder_phase_is_measured_for_each_architecture(
    architecture: str, make_job: MakeJob, single: Parallel
) -> None:
    job = make_job(sae={"architecture": architecture}, train={"batch_size": 64})
    figures = measure_steps(job, 16, None, 1, single)
    assert figures["phases_ms"]["forward_encode"] > 0


def test_the_floor_is_the_larger_of_the_matmul_and_memory_traffic_times_of_all_saes(
    make_job: MakeJob, single: Parallel
) -> None:
    job = make_job(sae={"k": [2, 4]}, train={"accumulate": 3, "precision": "fp32"})
    steps = RepeatedStep(job, 16, None, single)
    steps.take(1)
    figures = floor(steps, CPU, job)
    parameters = 2 * 16 * 64 + 64 + 16
    # The weights and both moments are each read once and written once.
    # The gradients and pre-activations are each written once and read once.
    per_sae = 2 * 4 * 4 * parameters + 3 * 2 * 4 * 128 * 64
    assert figures["traffic_bytes"] == 2 * per_sae
    assert figures["traffic_ms"] == pytest.approx(1000 * figures["traffic_bytes"] / figures["bandwidth_bytes_per_s"])
    assert figures["floor_ms"] == max(figures["encoder_product_ms"], figures["traffic_ms"])


def test_the_layers_of_a_cross_layer_transcoder_are_measured_together(make_job: MakeJob, single: Parallel) -> None:
    job = make_job(data={"hook": "mlp.0-2"}, sae={"cross_layer": True, "architecture": "batch_topk"})
    steps = RepeatedStep(job, 16, 16, single)
    steps.take(1)
    assert [tuple(one.sae.W_dec.shape) for one in steps.learners] == [(64, 48), (64, 32), (64, 16)]
    assert all(one.sae.written_before is None for one in steps.learners)


def test_without_a_job_file_the_default_sae_is_measured_at_a_common_width() -> None:
    job, (d_in, d_out, *_) = bench_job(None, ["sae.k=7", "launch.gpus=cpu"])
    assert d_out is None
    assert (d_in, job.sae.width(d_in), job.train.batch_size) == (768, 6144, 4096)
    assert job.sae.settings.k == 7


def test_synthetic_data_has_the_requested_width() -> None:
    job, shape = bench_job(None, ["data.source=synthetic", "data.d_in=48"])
    assert (shape.d_in, job.sae.width(48)) == (48, 384)


def test_a_transcoder_is_measured_with_two_widths(make_job: MakeJob, single: Parallel) -> None:
    job = make_job(sae={"architecture": "batch_topk"})
    figures = measure_steps(job, 16, 24, 1, single)
    assert (figures["d_in"], figures["d_out"]) == (16, 24)
    assert "d_in 16, d_out 24, d_sae 64" in table(figures)


def test_the_table_is_aligned_and_compares_the_step_with_the_floor(make_job: MakeJob, single: Parallel) -> None:
    figures = measure_steps(make_job(), 16, None, 1, single) | {"of_floor": 0.4321}
    lines = table(figures).splitlines()
    assert "this step runs at 43% of the floor's speed" in lines[-3]
    assert lines[-1].startswith("peak memory per rank")
    assert len({line.index(" ms") for line in lines if " ms" in line}) == 1
    for name in PHASES.values():
        assert any(line.startswith(f"  {name} ") for line in lines)


@pytest.mark.parametrize(
    ("settings", "start"),
    [
        (["sae.kk=2"], "sae.kk: is not a known setting"),
        (["launch.gpus=cpu:2", "parallel.mode=single"], "parallel.mode:"),
        (["sae.k=1000"], "sae.k: must be at most the number of latents, 64"),
    ],
)
def test_an_invalid_job_is_refused_before_any_measurement(
    settings: list[str], start: str, job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [part for setting in settings for part in ("--set", setting)]
    assert main(["bench", str(job_file), *overrides]) == EXIT_USAGE
    assert capsys.readouterr().err.startswith(start)


@pytest.mark.slow
def test_a_failed_rank_is_reported_with_its_reason(make_job: MakeJob) -> None:
    with pytest.raises(UserError, match=r"^launch\.gpus: PyTorch .* sees 0 GPUs, so rank 0 has none"):
        measure(make_job(), DataShape(16, None, 99), 1, world_size=1, gpu_uuids=("GPU-of-nobody",))


def test_ranks_on_gpus_agree_on_kernels_before_the_measurement(
    job_file: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Times(msgspec.Struct):
        step_s: float = 1.0

    kernels, gpu = triton_kernels.SPARSE_PRODUCTS, torch.device("cuda", 0)
    spec = RankSpec(run_dir=tmp_path, output_dir=tmp_path, attempt=1, world_size=1, device="cuda")
    # The test replaces all functions that require a GPU.
    monkeypatch.setattr(bench_rank, "rank_device", lambda *_: gpu)
    monkeypatch.setattr(bench_rank, "end_with_parent", lambda: None)
    monkeypatch.setattr(bench_rank, "arrange", lambda *_: (make_job(), None, Times()))
    monkeypatch.setattr(bench_rank, "agree", lambda *_, **__: triton_kernels.withhold([kernels.module]))
    monkeypatch.setattr(bench_rank, "measure_steps", lambda *_: {"withheld": kernels.is_withheld})
    monkeypatch.setenv("RANK", "0")
    try:
        bench_rank.main(write_spec(spec), 16, 0, 1)
    finally:
        triton_kernels.forget()
    assert json.loads((tmp_path / "found.json").read_text())["withheld"]

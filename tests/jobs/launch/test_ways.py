from __future__ import annotations

import dataclasses
import json
import os

import msgspec
import pytest
from support.cards import GIB, Cards
from support.workloads import workload

from sae_tui.doctor.base import look_at
from sae_tui.jobs.launch.ways import Way, fewest, job_rows, paying_more, why_not_more
from trainer.contract.planning import memory
from trainer.contract.planning.forecast import forecast
from trainer.contract.planning.hardware import CPU, MeasuredHardware, Speeds
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.job_file import parse_job

SLOW_BUS = Speeds(5e14, 3e12, 1e9, 1e-4, is_measured=True)


def job(**sections):
    raw = {"data": {"source": "synthetic", "d_in": 1024}, "sae": {"d_sae": 65536, "k": 32}}
    raw |= {"train": {"batch_size": 4096}} | sections
    parsed, problems = parse_job(raw)
    assert parsed, problems
    return parsed


def gpu_samples(count: int, gib: float = 80):
    return look_at(Cards(count, memory_bytes=int(gib * GIB)), {}).samples


def rows(config=None, samples=None, speeds=None, **options):
    config = config or job()
    return job_rows(
        config,
        config.data_shape(),
        gpu_samples(8) if samples is None else samples,
        speeds or MeasuredHardware(),
        **options,
    )


def test_each_number_of_gpus_has_one_row_per_mode_starting_with_the_chosen_mode() -> None:
    forecasts = rows(job(parallel={"mode": "ddp"}))
    assert [(row.n_gpus, row.mode) for row in forecasts] == [
        (1, "single"),
        *((2, mode) for mode in ("ddp", "tensor")),
        *((n, mode) for n in (4, 8) for mode in ("ddp", "tensor", "hybrid")),
    ]
    assert [row.chosen for row in forecasts] == [True, True, False, True, False, False, True, False, False]


@pytest.mark.parametrize(("slices_from", "gpus"), [(2, {1: (0,), 2: (0, 1)}), (0, {1: (0,), 2: ()})])
def test_a_mig_slice_does_not_count_as_a_second_gpu(slices_from: int, gpus: dict[int, tuple[int, ...]]) -> None:
    cut = [
        dataclasses.replace(gpu, uuid=f"MIG-{gpu.index}") if gpu.index >= slices_from else gpu for gpu in gpu_samples(4)
    ]
    assert {row.n_gpus: row.gpus for row in rows(samples=cut) if row.n_gpus <= 2} == gpus


def test_the_auto_mode_is_resolved_using_measured_speeds() -> None:
    slow = MeasuredHardware().with_measured("NVIDIA H100", "bf16", 2, SLOW_BUS)
    fast = MeasuredHardware().with_measured(
        "NVIDIA H100", "bf16", 2, msgspec.structs.replace(SLOW_BUS, bus_bytes_per_s=1e13)
    )
    for speeds in (slow, fast):
        (expected,) = forecast(Workload(job(), 1, job().data_shape(), "NVIDIA H100"), speeds, counts=(2,))
        (chosen,) = [row for row in rows(speeds=speeds) if row.chosen and row.n_gpus == 2]
        assert chosen.mode == expected.settled.job.parallel.mode
        assert (chosen.seconds, chosen.is_measured) == (expected.seconds, True)
        assert chosen.efficiency == pytest.approx(chosen.speed_up / 2)
        assert chosen.reason


def test_busy_gpus_are_chosen_last_and_the_job_does_not_fit_on_them_now() -> None:
    chosen = [row for row in rows(samples=gpu_samples(4), busy={0, 2}) if row.chosen and row.gpus]
    assert [(row.gpus, row.fits, row.fits_now) for row in chosen] == [
        ((1,), True, True),
        ((1, 3), True, True),
        ((0, 1, 2, 3), True, False),
    ]


def test_memory_is_estimated_for_the_same_number_of_tokens_per_step_in_every_mode() -> None:
    for row in rows():
        if not row.chosen:
            same_step = job().replace("train", global_batch_size=row.n_gpus * 4096)
            changed = same_step.replace("parallel", mode=row.mode)
            work = workload(changed, 1024, row.n_gpus).on_device(gpu_samples(1)[0].name)
            assert row.memory_bytes == memory.estimate(work).total


def test_all_modes_take_the_same_number_of_steps_on_the_same_number_of_gpus() -> None:
    for count in (2, 4, 8):
        tokens = {round(row.tokens_per_s * row.seconds) for row in rows() if row.n_gpus == count}
        assert max(tokens) - min(tokens) <= 1


def test_on_several_gpus_an_optimizer_that_needs_whole_matrices_can_only_use_ddp() -> None:
    modes = {row.mode for row in rows(job(train={"optimizer": "muon"}), gpu_samples(2))}
    assert modes == {"single", "ddp"}


def test_rows_for_more_gpus_than_exist_show_a_time_but_not_whether_the_job_fits() -> None:
    forecasts = rows(samples=gpu_samples(2))
    assert [row.fits for row in forecasts if row.n_gpus > 2] == [None] * 6
    assert all(row.seconds > 0 for row in forecasts)
    assert all(row.fits for row in forecasts if row.n_gpus <= 2)


def test_gpus_with_the_most_memory_are_chosen_unless_the_job_names_its_gpus() -> None:
    assert rows(samples=gpu_samples(4))[1].gpus == (0, 1)
    assert rows(job(launch={"gpus": [2, 3]}), gpu_samples(4))[1].gpus == (2, 3)


def test_gpus_of_different_models_are_only_as_fast_as_the_slowest_one() -> None:
    mixed = [
        dataclasses.replace(sample, name=name) for sample, name in zip(gpu_samples(2), ("H100", "T4"), strict=True)
    ]
    alike = [dataclasses.replace(sample, name="T4") for sample in gpu_samples(2)]
    assert rows(samples=mixed)[1].seconds == rows(samples=alike)[1].seconds
    assert rows(samples=mixed)[0].seconds < rows(samples=alike)[0].seconds


@pytest.mark.parametrize(("price", "dear"), [(None, None), (3.6, 7.2)])
def test_the_cost_covers_all_gpus_for_the_entire_time(price, dear) -> None:
    for one, two in zip(rows(price_per_gpu_hour=price), rows(price_per_gpu_hour=dear), strict=True):
        assert one.cost == (None if price is None else pytest.approx(one.n_gpus * one.seconds * price / 3600))
        assert two.cost == (None if price is None else pytest.approx(2 * one.cost))


@pytest.mark.parametrize("gpus", ["auto", "cpu", "cpu:3"])
def test_cpu_rows_cover_one_process_one_per_core_and_the_requested_number(gpus) -> None:
    forecasts = rows(job(launch={"gpus": gpus}), () if gpus == "auto" else gpu_samples(8))
    asked = 3 if gpus == "cpu:3" else 1
    assert {row.ranks for row in forecasts} == {1, asked, len(os.sched_getaffinity(0))}
    assert all((row.n_gpus, row.gpus, row.cost) == (0, (), None) for row in forecasts)
    assert all(row.fits is not None for row in forecasts)
    (expected,) = forecast(Workload(job(), 1, job().data_shape(), CPU), MeasuredHardware(), counts=(1,))
    assert forecasts[0].seconds == expected.seconds


def test_a_model_too_large_to_share_a_gpu_gets_its_own_gpus(tmp_path) -> None:
    (tmp_path / "text.txt").write_text("a cat sat")
    (tmp_path / "config.json").write_text(
        json.dumps({"hidden_size": 3584, "num_hidden_layers": 40, "dtype": "float16"})
    )
    (tmp_path / "pytorch_model.bin").touch()
    os.truncate(tmp_path / "pytorch_model.bin", 21 * 10**9)
    data = {"source": "model", "model": str(tmp_path), "hook": "resid_post.9", "text": str(tmp_path / "text.txt")}

    def told(model_gpus) -> dict[int, Way]:
        config, problems = parse_job(
            {"data": data | {"model_gpus": model_gpus}, "sae": {"d_sae": 65536}, "train": {"n_steps": 9}}
        )
        assert config, problems
        return {
            row.n_gpus: row
            for row in job_rows(config, config.data_shape(), gpu_samples(8, 24), MeasuredHardware())
            if row.chosen
        }

    assert not any(row.fits for row in told(0).values())
    for model_gpus in ("auto", 6):
        row = told(model_gpus)[8]
        assert row.fits
        assert " of 8 GPUs to itself: next to the SAE it would not fit into 2" in row.reason


def mixed(*gib: float):
    """Return idle, equally fast GPUs with these memory sizes, in GiB."""
    found = gpu_samples(len(gib))
    sizes = [int(size * GIB) for size in gib]
    return [
        dataclasses.replace(gpu, memory_total_bytes=size, memory_free_bytes=size - GIB, memory_used_bytes=GIB)
        for gpu, size in zip(found, sizes, strict=True)
    ]


def test_a_smaller_gpu_that_limits_the_others_is_never_worth_adding() -> None:
    fast = MeasuredHardware()
    for count in (1, 2, 4):
        fast = fast.with_measured("NVIDIA H100", "bf16", count, Speeds(5e14, 3e12, 1e13, 1e-5, is_measured=True))
    long = job(train={"batch_size": 4096, "n_tokens": 500_000_000})
    for sizes, count in (((80, 80, 80, 80), 4), ((80, 80, 24, 24), 2), ((80, 24, 24, 24), None)):
        found = rows(long, mixed(*sizes), fast)
        alone = fewest(found)
        assert alone.gpus == (0,)
        more = paying_more(alone, found)
        assert (more and more.ranks) == count
    assert why_not_more(alone, found) == "2 GPUs would include a smaller GPU, which limits the others"

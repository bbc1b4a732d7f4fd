from __future__ import annotations

import dataclasses
import os
from functools import partial

import pytest
from support.cards import GIB, Cards

from sae_tui.doctor.advice import job_report
from sae_tui.doctor.base import Finding, look_at
from sae_tui.jobs.gpus.availability import Holders, choices
from sae_tui.jobs.launch.best_gpus import refusal
from sae_tui.jobs.launch.placement import machine
from sae_tui.jobs.launch.ways import LEAST_EFFICIENCY
from trainer.contract.errors import Problem
from trainer.contract.paths import DataDir
from trainer.contract.planning.hardware import CPU, MeasuredHardware, Speeds
from trainer.contract.settings.job_file import parse_job


def job(**sections):
    raw = {"data": {"source": "synthetic", "d_in": 1024}, "sae": {"d_sae": 65536, "k": 32}}
    raw |= {"train": {"batch_size": 4096}} | sections
    parsed, problems = parse_job(raw)
    assert parsed, problems
    return parsed


def gpus(count: int, gib: float = 80):
    return look_at(Cards(count, memory_bytes=int(gib * GIB)), {}).samples


def measured(device: str, precision: str, bus: float, *counts: int) -> MeasuredHardware:
    speeds = MeasuredHardware()
    for count in counts:
        speeds = speeds.with_measured(device, precision, count, Speeds(5e14, 3e12, bus, 1e-5, is_measured=True))
    return speeds


def advice(*arguments, **options):
    """Return two findings: the source of the speeds, and the recommendation."""
    findings = job_report(*arguments, **options).findings
    assert [finding.subject for finding in findings] == ["speeds", "job"]
    return findings


def test_the_fewest_gpus_on_which_the_job_fits_are_recommended() -> None:
    _, finding = advice(job(), gpus(4))
    assert finding.level == "ok"
    assert finding.sentence.startswith("it fits on 1 GPU, ")
    assert ": --gpus 0" in finding.sentence
    alone = job_report(job(), gpus(4)).rows[0].memory_bytes
    _, finding = advice(job(), gpus(4, (alone - 1) / GIB))
    assert finding.level == "ok"
    assert "as tensor" in finding.sentence
    assert ": --gpus 0,1" in finding.sentence


def test_the_most_efficient_number_of_gpus_is_named_with_its_speed_up() -> None:
    fast, long = (
        measured("NVIDIA H100", "bf16", 1e13, 1, 2, 4),
        job(train={"batch_size": 4096, "n_tokens": 500_000_000}),
    )
    _, finding = advice(long, gpus(4), speeds=fast)
    best = [row for row in job_report(long, gpus(4), speeds=fast).rows if row.chosen and row.gpus][-1]
    assert best.efficiency >= LEAST_EFFICIENCY
    assert f"; 4 GPUs as {best.mode} take " in finding.sentence
    assert finding.sentence.endswith(f"{best.speed_up:.1f}× the speed of one: --gpus 0,1,2,3")


def test_more_gpus_are_not_recommended_if_they_save_only_seconds() -> None:
    _, finding = advice(job(), gpus(4), speeds=measured("NVIDIA H100", "bf16", 1e13, 1, 2, 4))
    assert "; more are not worth it: 2 GPUs would save 1 s" in finding.sentence


def test_gpus_with_a_slow_link_are_not_recommended_and_the_reason_is_given() -> None:
    _, finding = advice(job(), gpus(2), speeds=measured("NVIDIA H100", "bf16", 1e8, 1, 2))
    assert "; more are not worth it: 2 GPUs reach 0." in finding.sentence
    assert "on 2: " in finding.sentence.partition("more are not worth it")[2]


def test_the_speeds_finding_says_whether_times_are_measured() -> None:
    speeds, _ = advice(job(), gpus(4))
    assert (speeds.level, speeds.sentence) == (
        "note",
        "time estimates for 1, 2 and 4 GPUs use published specifications of these GPUs",
    )
    assert "doctor --probe" in speeds.remedy
    speeds, _ = advice(job(), gpus(2), speeds=measured("NVIDIA H100", "bf16", 1e10, 2))
    assert speeds.level == "ok"


def test_a_job_that_would_fit_only_if_the_gpus_were_free_is_a_warning() -> None:
    used = {"memory_used_bytes": 79 * GIB, "memory_free_bytes": GIB}
    taken = [dataclasses.replace(sample, **used) for sample in gpus(1)]
    _, finding = advice(job(), taken)
    assert finding.level == "warning"
    assert "but not now, because of the current use of GPU 0" in finding.sentence


def test_a_job_that_fits_nowhere_is_an_error_with_settings_that_help() -> None:
    _, finding = advice(job(), gpus(1, 1.5))
    assert finding.level == "error"
    assert finding.remedy


def test_gpus_on_which_the_job_cannot_be_launched_are_left_out(tmp_path) -> None:
    odd = job(parallel={"mode": "hybrid", "latent_ranks": 3})
    here = machine(choices(gpus(3), Holders()), DataDir(tmp_path), cuda=True)
    report = job_report(odd, gpus(3), refusal=partial(refusal, machine=here))
    assert {row.gpus for row in report.rows} == {(0, 1, 2), ()}
    nowhere = job(parallel={"mode": "hybrid", "latent_ranks": 3}, launch={"gpus": [0, 1]})
    report = job_report(nowhere, gpus(2), refusal=lambda _: Problem("parallel.latent_ranks", "is wrong; use 2"))
    assert report.rows == ()
    assert report.findings[-1] == Finding("error", "job", "parallel.latent_ranks: is wrong", "use 2")


def test_without_gpus_the_memory_is_reported_and_the_cpu_is_suggested() -> None:
    _, finding = advice(job(), ())
    assert finding.level == "note"
    assert finding.sentence.startswith("this machine has no GPU for it; on a GPU it would need ")
    assert finding.remedy.startswith("launch it on the CPU with --gpus cpu")


def test_on_the_cpu_a_number_of_processes_is_recommended() -> None:
    cores = {1, len(os.sched_getaffinity(0))}
    speeds, finding = advice(job(launch={"gpus": "cpu"}), gpus(2), speeds=measured(CPU, "fp32", 1e9, *cores))
    assert (speeds.level, finding.level) == ("ok", "ok")
    assert "--gpus cpu" in finding.sentence
    assert "GPU " not in finding.sentence


@pytest.mark.parametrize("price", [None, 2.5])
def test_the_report_contains_the_price(price) -> None:
    assert job_report(job(), (), price).price_per_gpu_hour == price

from __future__ import annotations

import dataclasses

import pytest
from support.cards import GIB, Cards

from sae_tui.doctor.base import look_at
from sae_tui.doctor.job import job_report
from trainer.contract import memory
from trainer.contract.config import parse_job


def job(**sections):
    raw = {"data": {"source": "synthetic", "d_in": 1024}, "sae": {"d_sae": 65536, "k": 32}, **sections}
    parsed, problems = parse_job(raw)
    assert parsed, problems
    return parsed


def cards(count: int, gib: float = 80):
    return look_at(Cards(count, memory_bytes=int(gib * GIB))).samples


def test_there_is_a_row_for_every_count_and_mode() -> None:
    rows = job_report(job(), cards(8)).rows
    assert [(row.n_gpus, row.mode) for row in rows] == [
        (1, "single"),
        *((2, mode) for mode in ("ddp", "tensor")),
        *((n, mode) for n in (4, 8) for mode in ("ddp", "tensor", "hybrid")),
    ]


def test_the_memory_is_that_of_the_estimate() -> None:
    for row in job_report(job(), cards(8)).rows:
        changed = job().replace("parallel", mode=row.mode)
        assert row.memory_bytes == memory.estimate(changed, 1024, row.n_gpus).total


def test_an_optimizer_that_needs_whole_matrices_is_only_offered_replicas() -> None:
    modes = {row.mode for row in job_report(job(train={"optimizer": "muon"}), cards(2)).rows}
    assert modes == {"single", "ddp"}


def test_rows_for_more_gpus_than_there_are_have_no_verdict() -> None:
    rows = job_report(job(), cards(2)).rows
    assert [row.fits for row in rows if row.n_gpus > 2] == [None] * 6
    assert all(row.fits for row in rows if row.n_gpus <= 2)


def test_the_roomiest_gpus_are_taken_and_only_named_ones_where_some_are() -> None:
    assert job_report(job(), cards(4)).rows[1].gpus == (0, 1)
    assert job_report(job(launch={"gpus": [2, 3]}), cards(4)).rows[1].gpus == (2, 3)


def test_the_fewest_gpus_that_hold_the_job_are_recommended() -> None:
    (finding,) = job_report(job(), cards(4)).findings
    assert finding.level == "ok"
    assert finding.sentence.endswith("--gpus 0")
    needed = [row.memory_bytes for row in job_report(job(), cards(4)).rows]
    (finding,) = job_report(job(), cards(4, (needed[0] - 1) / GIB)).findings
    assert finding.level == "ok"
    assert finding.sentence.endswith("--gpus 0,1")
    assert "as tensor" in finding.sentence


def test_a_job_that_fits_only_free_cards_is_a_warning() -> None:
    taken = [dataclasses.replace(sample, memory_used_bytes=79 * GIB) for sample in cards(1)]
    (finding,) = job_report(job(), taken).findings
    assert finding.level == "warning"
    assert "not beside what is on GPU 0 now" in finding.sentence


def test_a_job_that_fits_nowhere_is_an_error_with_settings_that_help() -> None:
    (finding,) = job_report(job(), cards(1, 1.5)).findings
    assert finding.level == "error"
    assert finding.remedy


def test_without_gpus_the_memory_is_told_and_the_cpu_named() -> None:
    report = job_report(job(), ())
    assert all(row.fits is None for row in report.rows)
    (finding,) = report.findings
    assert (finding.level, finding.remedy) == ("note", "launch it on the CPU with --gpus cpu")


@pytest.mark.parametrize("price", [None, 2.5])
def test_the_price_is_kept_with_the_report(price) -> None:
    assert job_report(job(), (), price).price_per_gpu_hour == price

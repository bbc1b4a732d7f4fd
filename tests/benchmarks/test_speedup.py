"""Tests that the tables in the documentation of the parallel modes match the cost model."""

from __future__ import annotations

import pytest
from benchmarks.speedup import GPUS, PAGE, SHAPES, forecasts, markdown, page_with, sent

from trainer.contract.planning.hardware import MeasuredHardware


def test_the_page_contains_the_current_cost_model_tables() -> None:
    page = PAGE.read_text()
    assert page == page_with(page), "PYTHONPATH=tests python tests/benchmarks/speedup.py --write"


def test_every_gpu_and_shape_has_a_row() -> None:
    lines = markdown().splitlines()
    for gpu in GPUS:
        assert sum(line.startswith(f"| {gpu.name} |") for line in lines) == len(SHAPES)


def test_only_ddp_sends_more_data_for_a_larger_sae() -> None:
    small, large = (SHAPES["A"]._replace(d_sae=d_sae) for d_sae in (16384, 65536))

    def megabytes(mode: str, n_gpus: int) -> list[int]:
        return [int(sent(shape, {"mode": mode}, n_gpus).replace(",", "")) for shape in (small, large)]

    assert megabytes("ddp", 4)[1] == pytest.approx(4 * megabytes("ddp", 4)[0], rel=0.01)
    assert megabytes("tensor", 4)[1] == megabytes("tensor", 4)[0]


def test_an_sae_that_is_too_large_for_every_mode_does_not_fit() -> None:
    rows = forecasts(SHAPES["A"]._replace(d_sae=2**21), GPUS[-1].name, {"mode": "auto"}, MeasuredHardware(), gib=8)
    assert not any(row.settled.fits for row in rows)


def test_a_page_without_markers_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"speedup\.py begins"):
        page_with("# A page\n")

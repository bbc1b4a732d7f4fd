"""Tests of the expected time of an evaluation."""

from __future__ import annotations

import msgspec
import pytest
from support.report_cards import FIGURES, card_table

from trainer.contract.runs.evaluation_time import model_time, planned
from trainer.contract.runs.report_card import PART_TITLES, ROWS, Card
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.model_size import ModelSize


def test_a_model_stored_in_bf16_is_expected_to_run_in_bf16_on_a_gpu() -> None:
    stored = {name: ModelSize(8 * 10**9, 4096, 32, stored=name) for name in ("bfloat16", "float32")}
    on_gpu = {name: model_time(size, "cuda", "NVIDIA H200") for name, size in stored.items()}
    # Both a pass over many tokens and a pass over one token must read all weights.
    assert on_gpu["float32"].pass_s(1024) == pytest.approx(10 * on_gpu["bfloat16"].pass_s(1024))
    assert on_gpu["bfloat16"].pass_s(1) > 16e9 / 4.8e12
    assert on_gpu["float32"].loading_s > on_gpu["bfloat16"].loading_s + 60
    on_cpu = [model_time(size, "cpu").effects_s(1000, 100) for size in stored.values()]
    assert on_cpu[0] == on_cpu[1] > on_gpu["float32"].effects_s(1000, 100)


def test_a_time_measured_with_refinement_is_not_expected_without_it() -> None:
    job, problems = parse_job({"data": {"source": "synthetic"}, "sae": {"d_sae": 256}, "train": {"n_steps": 10}})
    assert job, problems
    took = {ROWS: {"measured": 0.0, "step": 10, "n": 100, "unit": "rows", "device": "cpu", "seconds": 100.0}}
    refined = {"n_steps": 1, "fvu": 0.1, "fvu_error": 0.01, "l0": 4.0}
    figures = {0: FIGURES, 1: FIGURES | {"refined": refined}}
    for n_measured, of_card in figures.items():
        card = msgspec.convert(card_table(figures=of_card, parts=took), Card)
        seconds = {
            refine: planned(job, [ROWS], device="cpu", cards=[card], refine=refine)[PART_TITLES[ROWS]].seconds
            for refine in figures
        }
        assert [refine for refine, expected in seconds.items() if expected == 100.0] == [n_measured]

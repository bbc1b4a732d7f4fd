"""Tests of the expected time of an evaluation."""

from __future__ import annotations

import msgspec
from support.report_cards import FIGURES, card_table

from trainer.contract.runs.evaluation_time import planned
from trainer.contract.runs.report_card import PART_TITLES, ROWS, Card
from trainer.contract.settings.job_file import parse_job


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

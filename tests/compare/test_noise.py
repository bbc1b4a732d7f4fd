"""Tests that a run gets a star only if its lead exceeds the standard errors over texts and the noise between seeds."""

from __future__ import annotations

import random
import statistics

import msgspec
import pytest

from sae_tui.compare.run import ComparedSae
from sae_tui.compare.tables import ComparisonRow, results
from trainer.contract.runs.row_sums import RowSums, paired_error
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState


def run(number: int, fvu: float, error: float | None = None, sums: RowSums | None = None, **settings) -> ComparedSae:
    job = Job(
        id=number,
        name="x",
        config="",
        user="ada",
        host="here",
        device="cpu",
        gpu_source="none",
        state=JobState.FINISHED,
    )
    latest = {"card_fvu": fvu} | ({"card_fvu_error": error} if error is not None else {})
    return ComparedSae(str(number), job, "", {"train.seed": number} | settings, latest, sums)


def line_of(*saes: ComparedSae, title: str = "report card FVU") -> ComparisonRow:
    return next(line for line in results(saes) if line.title == title)


def sums_of(factor: float, rows: str = "a", jitter: float = 0.0, n: int = 400) -> RowSums:
    """Return an SAE's sums for each text; the same texts are hard for every SAE."""
    drawn = random.Random(0), random.Random(factor)
    spreads = [drawn[0].uniform(50, 150) for _ in range(n)]
    hard = [drawn[0].uniform(0.02, 0.38) for _ in range(n)]
    pairs = zip(spreads, hard, strict=True)
    return RowSums(rows, [factor * part * one * (1 + drawn[1].gauss(0, jitter)) for one, part in pairs], spreads)


def test_the_paired_error_agrees_with_resampling_the_texts() -> None:
    one, other, drawn = sums_of(1.0, jitter=0.1), sums_of(1.02, jitter=0.1), random.Random(1)
    differences = []
    for _ in range(500):
        texts = drawn.choices(range(400), k=400)
        fvus = [sum(of.errors[t] for t in texts) / sum(of.spreads[t] for t in texts) for of in (one, other)]
        differences.append(fvus[0] - fvus[1])
    assert paired_error(one, other) == pytest.approx(statistics.stdev(differences), rel=0.15)
    assert paired_error(one, sums_of(1.02, rows="b")) is None


def test_the_paired_error_finds_a_lead_that_separate_errors_hide() -> None:
    one, other = sums_of(1.0, jitter=0.02), sums_of(1.03, jitter=0.02)
    values = [(1, one.fvu, 0.005, one), (2, other.fvu, 0.005, other)]
    assert line_of(*(run(*each) for each in values)).best == {0}
    apart = line_of(run(*values[0]), run(2, other.fvu, 0.005, sums_of(1.03, rows="b")))
    assert apart.same == {0, 1}
    assert apart.why.startswith("report card FVU: 1 and 2 are considered equal; 1 leads by 0.00")
    assert apart.why.endswith("2 combined standard errors")


def test_with_few_texts_no_lead_is_significant_and_equal_values_form_a_group() -> None:
    def few(n: int, factor: float) -> RowSums:
        many = sums_of(factor, jitter=0.02)
        return RowSums("few", many.errors[:n], many.spreads[:n])

    for n, is_real in ((3, False), (40, True)):
        pair = few(n, 1.0), few(n, 1.05)
        line = line_of(*(run(number, one.fvu, 0.001, one) for number, one in enumerate(pair)))
        assert (line.best == {0}) == is_real
    same = line_of(*(run(number, one.fvu, 0.001, one) for number, one in enumerate([few(3, 1.0), few(3, 1.0)])))
    assert same.same == frozenset()
    line = line_of(*(run(number, few(3, one).fvu, 0.001, few(3, one)) for number, one in enumerate((1.0, 1.05))))
    assert line.why.endswith("no lead is significant: the rows come from only 3 texts, too few to estimate an error")
    values = [(1, 0.100, 1e-6), (2, 0.103, 1e-6), (3, 0.104, 0.01)]
    assert line_of(*(run(k, fvu, error, **{"sae.k": k}) for k, fvu, error in values)).same == {0, 1, 2}


def test_a_difference_within_two_combined_standard_errors_is_not_a_lead() -> None:
    def three(error: float) -> ComparisonRow:
        return line_of(*(run(k, fvu, error, **{"sae.k": k}) for k, fvu in ((1, 0.10), (2, 0.11), (3, 0.20))))

    assert three(0.004).same == {0, 1}
    assert three(0.003).best == {0}


def test_a_difference_below_one_percent_is_treated_as_seed_noise() -> None:
    line = line_of(run(1, 0.1000, 1e-6), run(2, 0.1009, 1e-6))
    assert line.words() == ["0.1 same", "0.1009 same"]
    assert "1%, which a different seed alone can cause (compare 3 seeds to measure this)" in line.why
    assert line_of(run(1, 0.1000, 1e-6), run(2, 0.1011, 1e-6)).best == {0}
    # The same limit applies if no standard error is known.
    assert line_of(run(1, 0.1000), run(2, 0.1009)).same == {0, 1}


def test_the_spread_between_seeds_is_measured_from_three_runs_with_the_same_settings() -> None:
    close = [run(seed, 0.1 + seed * 1e-6, 1e-7, **{"sae.k": 32}) for seed in range(3)]
    assert line_of(*close, run(9, 0.1005, 1e-7, **{"sae.k": 16})).same == {0, 1, 2}
    far = [run(seed, 0.1 + 0.004 * seed, 1e-7, **{"sae.k": 32}) for seed in range(3)]
    line = line_of(*far, run(9, 0.108, 1e-7, **{"sae.k": 16}))
    assert line.same == {0, 1, 2, 3}
    assert line.why.endswith("2 × the spread between seeds, for two runs")
    # Two seeds are not enough, and neither are three runs with different settings.
    assert line_of(*close[:2], run(9, 0.1005, 1e-7, **{"sae.k": 16})).same == {0, 1, 2}
    unlike = [run(seed, 0.1 + seed * 1e-6, 1e-7, **{"sae.k": 32 + seed}) for seed in range(3)]
    assert line_of(*unlike, run(9, 0.1005, 1e-7)).same == {0, 1, 2, 3}


def test_the_explanation_of_a_lead_in_fvu_includes_the_l0_values_if_they_differ() -> None:
    def at(number: int, fvu: float, l0: float) -> ComparedSae:
        sae = run(number, fvu, 1e-6)
        return msgspec.structs.replace(sae, latest=sae.latest | {"card_l0": l0})

    assert line_of(at(1, 0.10, 32.0), at(2, 0.12, 33.5)).why == ""
    line = line_of(at(1, 0.10, 36.4), at(2, 0.12, 32.0))
    assert line.best == {0}
    note = "the L0 values differ, and a higher L0 alone lowers the report card FVU: 1 at 36.4 and 2 at 32.0"
    assert line.why.endswith(note)

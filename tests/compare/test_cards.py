"""Tests for the differences between two report cards."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.report_cards import AUC, FIGURES, PROBING, SPLICED, card_table

from sae_tui.compare.cards import Difference, differences, limits_of
from trainer.contract.runs.explanations import ExplainedLatents, MeanScore
from trainer.contract.runs.report_card import Card


def card(spliced: dict[str, Any] | None = None, data: dict[str, Any] | None = None, **figures: Any) -> Card:
    table = card_table(figures=FIGURES | figures, spliced=SPLICED | (spliced or {}))
    return msgspec.convert(table | {"data": table["data"] | (data or {})}, Card)


def named(here: Card, there: Card) -> dict[str, Difference]:
    return {one.figure.name: one for one in differences(here, there)}


@pytest.mark.parametrize(
    ("fvu", "error", "mark", "signed"),
    [
        (0.25, 0.01, "=", ""),
        # Two standard errors of the difference are 0.0283.
        (0.275, 0.01, "=", "-0.0250"),
        (0.28, 0.01, "better", "-0.0300"),
        (0.22, 0.01, "worse", "+0.0300"),
        (0.22, 0.04, "=", "+0.0300"),
    ],
)
def test_figures_with_errors_count_as_the_same_within_two_standard_errors(
    fvu: float, error: float, mark: str, signed: str
) -> None:
    one = named(card(), card(fvu=fvu, fvu_error=error))["fvu"]
    assert (one.mark, one.signed, one.is_exact) == (mark, signed, False)


def test_a_figure_without_an_error_is_compared_by_its_digits_and_marked() -> None:
    found = named(card(), card(cosine=0.8999, mse=1.5 + 1e-9))
    assert (found["cosine"].mark, found["cosine"].signed) == ("better*", "+0.0001")
    assert (found["mse"].mark, found["mse"].signed) == ("=*", "")


def test_an_error_known_for_only_one_report_card_is_ignored() -> None:
    table = {name: value for name, value in FIGURES.items() if name != "fvu_error"}
    there = msgspec.convert(card_table(figures=table | {"fvu": 0.2501}), Card)
    assert named(card(), there)["fvu"].mark == "better*"


def test_the_declared_direction_decides_which_figure_is_better() -> None:
    there = card({"ce_score": 0.9, "ce_with_sae": 3.7}, fvu=0.3, l0=40.0, dense_10=0.5, explained_variance=0.7)
    marks = {name: one.mark for name, one in named(card(), there).items()}
    assert {marks[name] for name in ("fvu", "explained_variance", "ce_score")} == {"better"}
    assert marks["loss_with_sae"] == "better*"
    assert {marks[name] for name in ("l0", "dense_10")} == {"differs*"}


def test_losses_on_different_texts_and_latents_on_different_rows_are_not_ranked() -> None:
    here, there = card(), card({"ce": 3.4, "ce_with_sae": 3.7}, n_tokens=500, dead=0.5)
    found = named(here, there)
    assert [found[name].mark for name in ("loss_with_sae", "dead")] == ["differs*", "differs"]
    assert list(limits_of(here, there)) == [
        "measured on 1,000 rows here, on 500 there",
        "the language model read different texts, so its losses and scores are not ranked",
    ]


def test_scores_on_different_texts_or_with_different_tokens_left_out_are_not_ranked() -> None:
    for spliced in ({"text": "other.jsonl"}, {"n_tokens": 9}, {"n_texts": 9}, {"left_out": "first tokens"}):
        found = named(card(), card(spliced | {"ce_score": 0.6, "kl_score": 0.6}))
        assert [found[name].mark for name in ("ce_score", "kl_score")] == ["differs", "differs"]
    there = card({"left_out": "first tokens"})
    (limit,) = limits_of(card(), there)
    assert limit == "the losses leave out no tokens here, first tokens there, so they are not ranked"


def test_two_measurements_of_the_language_models_loss_may_differ_in_the_last_digits() -> None:
    there = card({"ce": 3.5 + 1e-8, "ce_score": 0.6, "ce_with_sae": 3.9})
    found = named(card(), there)
    assert [found[name].mark for name in ("ce_score", "loss_with_sae")] == ["better", "better*"]
    assert not list(limits_of(card(), there))


def test_reconstructions_of_different_rows_are_not_ranked() -> None:
    for data in ({"place": "elsewhere"}, {"dimensions": "dimension 3 is left out"}):
        found = named(card(), card(data=data, fvu=0.5, median_row_fvu=0.5, cosine=0.5, mse=9.0, explained_variance=0.5))
        names = ("fvu", "explained_variance", "median_row_fvu", "cosine", "mse")
        assert {found[name].mark.rstrip("*") for name in names} == {"differs"}
    (limit,) = limits_of(card(), card(data={"dimensions": "dimension 3 is left out"}))
    assert limit == "different dimensions are left out or scaled down, so the reconstructions are not ranked"
    assert named(card(), card(data={"place": "elsewhere"}, dead=0.5))["dead"].mark == "differs"


@pytest.mark.parametrize(("ours", "theirs"), [(106.0, 100.0), (100.0, 106.0), (5.0, 0.0), (0.0, 5.0)])
def test_different_l0_values_are_reported_whichever_is_larger(ours: float, theirs: float) -> None:
    (limit,) = limits_of(card(l0=ours), card(l0=theirs))
    assert limit.startswith(f"L0 is {ours:.1f} here, {theirs:.1f} there")


def test_a_small_difference_between_fractions_is_shown_in_percent() -> None:
    assert named(card(dead=0.02049), card(dead=0.02051))["dead"].signed == "-0.002%"


def test_the_limits_of_a_comparison_are_named() -> None:
    there = card(data={"place": "elsewhere"}, l0=16.0)
    assert list(limits_of(card(), there)) == [
        "measured on rows from data/sample here, but from elsewhere there",
        "L0 is 32.0 here, 16.0 there: a higher L0 alone lowers the FVU",
    ]
    assert not list(limits_of(card(), card()))


def test_a_figure_on_only_one_report_card_is_listed_as_missing_on_the_other() -> None:
    more = PROBING | {"k": {"1": AUC, "64": AUC}}
    there = msgspec.convert(card_table(spliced=None, probing=more), Card)
    found = named(card(), there)
    assert (found["ce_score"].mark, found["auc_16"].mark, found["auc_64"].mark) == (
        "only here",
        "only here",
        "only there",
    )
    assert found["auc_1"].mark == "="


def test_scores_of_explanations_are_ranked_only_if_the_same_model_explains() -> None:
    def explained(mean: float, model: str) -> Card:
        score = MeanScore(mean, 0.01, 100, (0,) * 10)
        summary = ExplainedLatents(n_latents=100, models=(model,), prompts=("v1",), detection=score)
        return msgspec.structs.replace(card(), explained=summary)

    here = explained(0.8, "a")
    assert named(here, explained(0.81, "a"))["detection"].mark == "="
    assert named(here, explained(0.7, "a"))["detection"].mark == "better"
    other = explained(0.7, "b")
    assert named(here, other)["detection"].mark == "differs"
    assert list(limits_of(here, other)) == ["explained by a here, by b there, so the scores are not ranked"]

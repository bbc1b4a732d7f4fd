"""Tests for the figures on a report card and the warnings about them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from support.report_cards import FIGURES, SPLICED, card_table

from trainer.contract.runs.card_figures import cautions, figures_of, over_seeds, title_of_group
from trainer.contract.runs.how_far import HowFar
from trainer.contract.runs.report_card import Card, facts, summary


def card(**parts: Any) -> Card:
    return msgspec.convert(card_table(**parts), Card)


def test_figures_are_shown_with_their_errors_in_their_own_format() -> None:
    texts = {one.name: (one.text, one.error_text) for one in figures_of(card())}
    assert texts["fvu"] == ("0.2500", "0.0100")
    assert texts["dead"] == ("2.0%", "0.5%")
    assert texts["ce_score"] == ("0.9500", "0.0040")
    assert texts["auc_16"] == ("0.800", "0.010")
    assert texts["mse"] == ("1.5", "")


def test_figures_that_were_not_measured_are_left_out() -> None:
    one = card(figures=FIGURES | {"cosine": math.nan, "fvu_error": math.nan}, spliced=None, probing=None)
    found = {each.name: each for each in figures_of(one)}
    assert {each.group for each in found.values()} == {"reconstruction", "latents"}
    assert not found.keys() & {"cosine", "rare", "recovery", "fvu_all_dimensions"}
    assert found["fvu"].error is None


def test_losses_without_first_tokens_and_on_all_tokens_are_separate_groups() -> None:
    losses = {name: SPLICED[name] for name in ("n_tokens", "ce", "ce_score")}
    rows = {"n_rows": 9, "explained_variance": 0.5, "l0": 8.0}
    one = card(spliced=SPLICED | {"left_out": "first tokens", "all_tokens": losses | {"rows": rows}})
    texts = {each.name: each.text for each in figures_of(one) if each.group == "all_tokens"}
    assert texts == {
        "all_tokens_ce_score": "0.9500",
        "all_tokens_loss": "3.5000",
        "all_tokens_explained": "50.00%",
        "all_tokens_l0": "8.0",
    }
    assert title_of_group("model", one) == "Language model, without first tokens"
    assert title_of_group("model", card()) == "Language model"
    assert title_of_group("model", card(spliced=SPLICED | {"left_out": ""})) == "Language model, all tokens"


def test_figures_have_a_mean_and_deviation_over_seeds_if_all_were_measured_the_same_way() -> None:
    data = card_table()["data"]
    cards = {
        f"k=8,seed={seed}": card(figures=FIGURES | {"fvu": fvu}, recovery=recovery, data=data | {"place": place})
        for seed, fvu, recovery, place in ((0, 0.2, 0.5, "a"), (1, 0.3, None, "a"))
    }
    cards |= {"k=16,seed=0": card(), "k=32": card()}
    found = {figure.name: spread for figure, spread in over_seeds(cards, "k=8,seed=1")}
    assert found["fvu"].mean == pytest.approx(0.25)
    assert found["fvu"].sd == pytest.approx(math.sqrt(0.005))
    assert "recovery" not in found
    cards["k=8,seed=0"] = card(data=data | {"place": "b"})
    assert "fvu" not in {figure.name for figure, _ in over_seeds(cards, "k=8,seed=1")}
    assert over_seeds(cards, "k=16,seed=0") == over_seeds(cards, "k=32") == []


def test_each_warning_has_a_remedy() -> None:
    data = card_table()["data"] | {"heavy": "dimension 7 holds 60 % of the variance", "is_trained_on": True}
    training = HowFar(step=5, total_steps=9, lr_share=0.5)
    one = msgspec.structs.replace(card(data=data), training=training)
    assert [caution.text.partition(" ")[0] for caution in cautions(one)] == ["dimension", "the", "stopped"]
    assert all(caution.remedy for caution in cautions(one))
    assert not cautions(card())


@pytest.mark.parametrize(
    ("figures", "spliced", "words"),
    [
        ({"n_clusters": 2, "clustered_by": "texts"}, {}, "the rows come from only 2 texts, too few to say how exact"),
        ({"n_clusters": 1, "clustered_by": "blocks"}, {}, "the rows come from only 1 block, too few to say how exact"),
        ({"n_tokens": 3}, {}, "only 3 rows were measured, too few to say how exact the figures are"),
        ({}, {"n_texts": 2}, "the model read only 2 texts, too few to say how exact its scores are"),
    ],
)
def test_a_card_measured_on_few_texts_or_rows_says_so_everywhere(
    figures: dict[str, Any], spliced: dict[str, Any], words: str
) -> None:
    one = card(figures=FIGURES | figures, spliced=SPLICED | spliced)
    (caution,) = [each.text for each in cautions(one) if words in each.text]
    assert caution in summary(one)
    assert caution in dict(facts(one))["note"]
    enough = card(figures=FIGURES | {"n_clusters": 4, "clustered_by": "texts"}, spliced=SPLICED | {"n_texts": 4})
    assert not [each for each in cautions(enough) if "too few" in each.text]


def test_shares_and_correlations_from_too_few_rows_are_not_shown() -> None:
    stability = {"others": ["seed=1"], "share": 0.5, "median": 0.7, "encoder_share": 0.25, "firing_correlation": 0.5}
    few: set[str] = {"dense_10", "firing_correlation"}
    for n_rows, shown in ((1000, few | {"dense_1"}), (100, few), (99, set())):
        one = card(figures=FIGURES | {"n_tokens": n_rows}, stability=stability | {"n_rows": n_rows, "rows": "1f"})
        names = {each.name for each in figures_of(one)}
        assert names & {"dense_1", "dense_10", "firing_correlation"} == shown
    assert dict(facts(one))["latents"].endswith("too few rows to say which are dense")
    assert dict(facts(one))["stability"].endswith("; 99 rows, too few to say how firing correlates")
    assert "dense" not in summary(one)


def test_the_figures_of_refined_activations_are_compared_only_after_as_many_steps() -> None:
    refined = {"n_steps": 2, "fvu": 0.2, "fvu_error": 0.01, "l0": 30.5}
    one = card(figures=FIGURES | {"refined": refined})
    found = {each.name: each for each in figures_of(one)}
    assert (found["refined_fvu"].text, found["refined_fvu"].error_text, found["refined_l0"].text) == (
        "0.2000", "0.0100", "30.5",
    )  # fmt: skip
    other = {each.name: each for each in figures_of(card(figures=FIGURES | {"refined": refined | {"n_steps": 1}}))}
    assert other["refined_fvu"].condition != found["refined_fvu"].condition
    assert dict(facts(one))["FVU, refined"] == "0.2000 ± 0.0100 at L0 30.5, with refine=2 in Python only"
    assert "refined_fvu" not in {each.name for each in figures_of(card())}

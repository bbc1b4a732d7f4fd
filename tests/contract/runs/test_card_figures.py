"""Tests for the figures on a report card and the warnings about them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from support.report_cards import FIGURES, SPLICED, card_table

from trainer.contract.runs.card_figures import cautions, figures_of, over_seeds, title_of_group
from trainer.contract.runs.how_far import HowFar
from trainer.contract.runs.report_card import Card


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

"""Tests for reading and printing report cards, including outdated, damaged and incomplete ones."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.features import features_file
from support.report_cards import FIGURES, card_table

from trainer.contract.runs.card_figures import figures_of
from trainer.contract.runs.explanations import Explanation, ExplanationsFile, record
from trainer.contract.runs.features import CARD, FEATURES, Features
from trainer.contract.runs.recipe import Recipe
from trainer.contract.runs.report_card import (
    AllTokens,
    Card,
    SampledText,
    TextRows,
    as_table,
    data_cautions,
    facts,
    marked,
    read_card,
    sample_latents,
    summary,
    with_explanations,
)


def card(**figures: Any) -> Card:
    return msgspec.convert(card_table(figures=FIGURES | figures), Card)


def by_title(one: Card) -> dict[str, str]:
    return dict(facts(one))


def test_a_written_card_is_read_back_unchanged(tmp_path: Path) -> None:
    one = card(relative_reconstruction_bias=math.nan, rare=None)
    (tmp_path / CARD).write_text(json.dumps(as_table(one), allow_nan=False))
    read = read_card(tmp_path)
    assert read
    assert math.isnan(read.figures.relative_reconstruction_bias)
    assert as_table(read) == as_table(one)


def test_a_card_from_an_older_version_is_read_without_the_newer_fields(tmp_path: Path) -> None:
    table = card_table()
    del table["figures"]["dead_error"], table["latents"]
    del table["spliced"]["ce_score_error"]
    (tmp_path / CARD).write_text(json.dumps(table))
    read = read_card(tmp_path)
    assert read
    assert by_title(read)["latents"].startswith("2.0% did not fire in 1,000 rows, ")
    assert by_title(read)["CE score"].startswith("0.9500: ")


def test_the_firing_correlation_is_shown_unless_the_card_is_from_an_older_version(tmp_path: Path) -> None:
    older = {"others": ["seed=1"], "share": 0.5, "median": 0.7, "encoder_share": 0.25, "pw_mcc": 0.6}
    cosines = "50.0% of latents have a decoder cosine above 0.7 with a latent of the other seed; 25.0% of the encoder "
    cosines += "directions; PW-MCC 0.600"
    measured = older | {"firing_correlation": 0.4567, "n_rows": 1200, "rows": "1f"}
    firing = "; mean firing correlation 0.457 in 1,200 rows"
    for stability, words, value in ((older, cosines, None), (measured, cosines + firing, 0.4567)):
        (tmp_path / CARD).write_text(json.dumps(card_table(stability=stability)))
        read = read_card(tmp_path)
        assert read
        assert by_title(read)["stability"] == words
        assert as_table(read)["stability"]["firing_correlation"] == value
        found = {one.name: one for one in figures_of(read)}
        assert ("firing_correlation" in found) == (value is not None)
    assert (found["firing_correlation"].text, found["firing_correlation"].condition) == ("0.457", "1f")


AT_NO_TIME = {"rows": {"measured": 1e300, "step": 1, "n": 1, "unit": "rows"}}


@pytest.mark.parametrize(
    "content",
    ["", "{}", "[1]", '{"figures": 1}', '{"a": ' * 5000, json.dumps(card_table(parts=AT_NO_TIME))],
    ids=["empty", "no field", "list", "number", "deep", "no time"],
)
def test_a_damaged_card_is_treated_as_missing(tmp_path: Path, content: str) -> None:
    (tmp_path / CARD).write_text(content)
    assert read_card(tmp_path) is None
    assert read_card(tmp_path / "gone") is None


def test_figures_are_shown_with_their_errors_and_unknown_ones_as_a_dash() -> None:
    one = by_title(card(rare=None))
    assert one["FVU"] == "0.2500 ± 0.0100, median row 0.2400"
    assert (
        one["latents"]
        == "2.0% ± 0.5% did not fire in 1,000 rows, too few rows to say which are rare, 10.0% > 1 %, 1.0% > 10 %"
    )
    assert one["CE score"].startswith("0.9500 ± 0.0040: ")
    assert one["KL score"].startswith("0.9600 ± 0.0030: ")
    assert "12.5% rare" in by_title(card(rare=0.125))["latents"]
    assert by_title(card(fvu_error=math.nan))["FVU"].startswith("0.2500, ")


def test_scores_name_the_tokens_that_they_cover() -> None:
    rows = TextRows(n_rows=100, explained_variance=0.8, l0=35.0)
    every = AllTokens(
        n_tokens=104,
        ce=3.9,
        ce_with_sae=6.4,
        ce_with_zeros=10.8,
        ce_score=0.634,
        kl_score=0.639,
        rows=TextRows(n_rows=104),
    )
    spliced = msgspec.structs.replace(
        card().spliced, left_out="first tokens and special tokens", rows=rows, all_tokens=every
    )
    both = by_title(msgspec.structs.replace(card(), spliced=spliced))
    assert both["CE score"] == (
        "0.9500 ± 0.0040 without first tokens and special tokens; 0.6340 all tokens, as in SAELens"
    )
    assert both["KL score"].endswith("; 0.6390 all tokens, as in SAELens")
    assert both["on this text"].startswith("80.00% of the variance explained at L0 35.0 without first tokens")
    assert both["on this text"].endswith("; – of the variance explained at L0 – all tokens, as in SAELens")
    assert both["loss, all tokens"].startswith("6.400 with the SAE, 3.900 without, 10.800 with zeros; KL – with")
    every_row = msgspec.structs.replace(spliced, left_out="")
    one = by_title(msgspec.structs.replace(card(), spliced=every_row))
    assert one["CE score"].startswith("0.9500 ± 0.0040 all tokens, as in SAELens: ")


def test_an_l0_that_misses_its_target_is_shown_next_to_the_target() -> None:
    recipe = Recipe(
        optimizer="adam", optimizer_settings={"beta1": 0.9}, lr=0.01, encoder_follows=False, warmup_fraction=0.05,
        decay_fraction=0.2, batch_tokens=512, steps=391, planned_steps=500, tokens=200_192, passes=12.86, target_l0=32,
        seed=1,
    )  # fmt: skip
    missed = msgspec.structs.replace(card(l0=36.4), recipe=recipe, threshold_set_on="training rows")
    assert by_title(missed)["L0"].startswith("36.4, 32 asked, +14% (5 % ")
    assert "L0 36.4 (32 asked, +14%), " in summary(missed)
    assert by_title(missed)["recipe"].startswith(
        "adam (beta1 0.9), learning rate 0.01; encoder and decoder updates are not tied"
    )
    assert by_title(missed)["schedule"] == "rises over 5% of the steps, decays over the last 20%"
    assert by_title(missed)["steps"] == "391 of 500, 512 tokens each, seed 1"
    near = msgspec.structs.replace(missed, figures=card(l0=32.5).figures, threshold_set_on="held-out rows")
    assert by_title(near)["L0"].startswith("32.5, 32 asked (5 % ")
    assert "asked" not in summary(near)
    assert (
        by_title(near)["threshold"]
        == "set on held-out rows so that L0 is 32; each half is measured with the threshold of the other half"
    )


def test_notes_on_a_flattering_fvu_follow_it_and_are_in_the_summary() -> None:
    data = msgspec.structs.replace(
        card().data,
        heavy="dimension 7 holds 60 % of the variance",
        zero_fraction=0.4,
        copies=0.05,
        dimensions="dimension 3 left out",
    )
    one = msgspec.structs.replace(card(fvu_all_dimensions=0.3), data=data)
    titles = [title for title, _ in facts(one)]
    assert titles[:6] == ["FVU", "dimensions", *["note on FVU"] * 3, "explained variance"]
    notes = [words for _, words in facts(one)[1:5]]
    assert notes[0] == "dimension 3 left out; FVU of all dimensions 0.3000"
    assert notes[3].endswith("the FVU is too low; remove the copies from the data, or hold out whole texts")
    texts = [caution.text for caution in data_cautions(data)]
    assert summary(one).endswith("; ".join(["", notes[0], *texts]))


def test_sampled_latents_fire_and_are_the_same_each_time(tmp_path: Path) -> None:
    file = tmp_path / FEATURES
    file.write_bytes(features_file())
    latents = sample_latents(Features(file))
    features = Features(file)
    assert [one.latent for one in latents] == features.order("latent")
    assert latents == sample_latents(Features(file))
    for one in latents:
        feature = features.feature(one.latent)
        assert one.density == feature.density
        assert [text.act for text in one.texts] == [context.act for context in feature.contexts[:2]]


def test_the_most_active_token_in_a_text_is_marked_without_its_space() -> None:
    assert marked(SampledText((" a", " b\n", "c"), 1, 1.0)) == "a [b⏎]c"
    assert marked(SampledText(("x", "\n"), 1, 1.0), "<", ">") == "x<⏎>"


TWIN = {"label": "freeze=decoder", "frozen": "decoder", "figures": {"fvu": 0.6, "auc_1": 0.7}, "errors": {"fvu": 0.01}}
KNOWN = {"n_features": 80, "n_rows": 8192, "f1": 0.5}
ROWS_PART = {"rows": {"measured": 1.0, "step": 1, "n": 1, "unit": "rows"}}


@pytest.mark.parametrize("place", ["data/sample", "elsewhere"])
def test_figures_of_twins_and_known_features_are_kept_only_for_the_same_rows(place: str) -> None:
    older = msgspec.convert(card_table(twins=[TWIN], known=KNOWN), Card)
    data = card_table()["data"] | {"place": place}
    newer = msgspec.convert(card_table(data=data, parts=ROWS_PART), Card).with_older(older)
    kept = place == "data/sample"
    assert bool(newer.twins) == bool(newer.known) == kept
    assert ("0.6000 with a random decoder" in summary(newer)) == kept
    assert ("F1 0.500" in summary(newer)) == kept


def test_figures_of_a_twin_are_listed_with_their_errors() -> None:
    one = msgspec.convert(card_table(twins=[TWIN, TWIN | {"figures": {}}], known=KNOWN), Card)
    assert by_title(one)["random decoder"] == "FVU 0.6000 ± 0.0100, AUC (k = 1) 0.700"
    assert by_title(one)["known features"].endswith("uniqueness –; – of 80 features fire per row")
    assert [title for title, _ in facts(one)].count("random decoder") == 1


def test_a_card_with_unknown_frozen_weights_is_treated_as_missing(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text(json.dumps(card_table(twins=[TWIN | {"frozen": "x | <img src=a>"}])))
    assert read_card(tmp_path) is None


def described(latent: int, detection: float | None = None, weights: str = "w", **more: Any) -> Explanation:
    error = None if detection is None else 0.05
    scores = {"detection": detection, "detection_error": error}
    return Explanation(latent=latent, weights=weights, **({"text": "kings", "model": "m"} | scores | more))


def test_a_card_shows_the_mean_scores_of_the_explanations_of_its_weights(tmp_path: Path) -> None:
    scores = [0.5, 0.75, 0.95, 1.0]
    stale, failed, beyond = described(5, 0.1, "old"), described(6, text="", problem="refused"), described(64, 0.1)
    unscored = described(7, model="n")
    record(tmp_path, *map(described, range(4), scores), stale, failed, beyond, unscored)
    one = with_explanations(msgspec.structs.replace(card(), weights="w"), ExplanationsFile(tmp_path))
    assert one.explained
    assert (one.explained.n_latents, one.explained.models, one.explained.fuzzing) == (5, ("m", "n"), None)
    detection = one.explained.detection
    assert detection
    assert (detection.mean, detection.n, detection.histogram) == (0.8, 4, (0, 0, 0, 0, 0, 1, 0, 1, 0, 2))
    assert detection.error == pytest.approx(math.sqrt(sum((score - 0.8) ** 2 for score in scores) / 3 / 4))
    words = f"5 of 64 latents described by m, n; mean detection 0.800 ± {detection.error:.3f} (chance 0.5)"
    assert by_title(one)["explanations"] == words
    assert as_table(one)["explained"]["detection"]["n"] == 4
    # Descriptions are written after the report card, so its file does not contain them.
    assert b'"explained"' not in one.as_json()
    (tmp_path / CARD).write_text(json.dumps(as_table(one)))
    read = read_card(tmp_path)
    assert read
    assert read.explained is None
    assert with_explanations(card(), ExplanationsFile(tmp_path)).explained is None

"""Tests for the choice of texts for an explanation and its scores, and for the scores themselves."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta
from sklearn.metrics import balanced_accuracy_score
from support.stub_llm import WORDS, explained_file

from sae_tui.explain.examples import IN_A_REQUEST, LEAST, balanced_accuracy, choose
from sae_tui.explain.prompts import marked
from trainer.contract.runs.features import Features


def features_of(tmp_path: Path, n_contexts: int = 20) -> Features:
    file = tmp_path / "features.safetensors"
    file.write_bytes(explained_file(n_contexts))
    return Features(file)


def test_scores_use_other_texts_than_the_description(tmp_path: Path) -> None:
    features = features_of(tmp_path)
    chosen = choose(features, features.feature(2), features.order("latent"), 0)
    shown = {marked(one, ()) for one in chosen.shown}
    detection = [one for request in chosen.detection for one in request]
    fuzzing = [one for request in chosen.fuzzing for one in request]
    own = {marked(one, ()) for one in features.feature(2).contexts}
    held = {one.text for one in detection if one.is_right}
    assert (len(shown), len(held)) == (10, 10)
    assert shown | held == own
    assert not shown & held
    # The latent is silent on all other texts, and the wrong marks are on other tokens of the same texts.
    assert {WORDS[2] in one.text for one in detection if not one.is_right} == {False}
    assert {f"<<{WORDS[2]}>>" in one.text for one in fuzzing if one.is_right} == {True}
    assert {f"<<{WORDS[2]}>>" in one.text for one in fuzzing if not one.is_right} == {False}
    assert {one.text.replace("<<", "").replace(">>", "") for one in fuzzing} == held
    assert [one.text.count("<<") for one in fuzzing] == [1] * 20
    assert sum(one.is_right for one in detection) == sum(one.is_right for one in fuzzing) == 10
    # A request never has the same text twice, so that the model cannot compare the marks.
    for request in chosen.fuzzing:
        assert len({one.text.replace("<<", "").replace(">>", "") for one in request}) == len(request) <= IN_A_REQUEST


def test_the_same_seed_chooses_the_same_texts_whatever_else_is_explained(tmp_path: Path) -> None:
    features = features_of(tmp_path)
    alive = features.order("latent")
    first = choose(features, features.feature(3), alive, 5)
    choose(features, features.feature(1), alive, 5)
    random.seed(1)
    assert choose(Features(tmp_path / "features.safetensors"), features.feature(3), alive, 5) == first
    assert choose(features, features.feature(3), alive, 6) != first


@pytest.mark.parametrize("n_contexts", [1, LEAST - 1, LEAST, 10])
def test_few_texts_are_all_shown_and_none_is_held_back(tmp_path: Path, n_contexts: int) -> None:
    features = features_of(tmp_path, n_contexts)
    chosen = choose(features, features.feature(0), features.order("latent"), 0)
    if n_contexts < LEAST:
        assert (len(chosen.shown), chosen.detection, chosen.fuzzing) == (n_contexts, (), ())
    else:
        assert len(chosen.shown) == n_contexts // 2
        assert sum(map(len, chosen.detection)) == 2 * (n_contexts // 2)


def test_texts_from_the_same_passage_are_not_taken_as_silent(tmp_path: Path) -> None:
    features = features_of(tmp_path)
    feature = features.feature(0)
    assert not choose(features, feature, [0], 0).detection
    # Latent 1 fires on the same texts as far as they are stored: it has the same passages.
    stolen = Features(tmp_path / "features.safetensors")
    stolen._ints = lambda name, latent=None: features._ints(name, 0 if latent == 1 else latent)  # type: ignore[method-assign]
    assert not choose(stolen, feature, [0, 1], 0).detection
    assert choose(features, feature, [0, 1], 0).detection


ANSWERS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60)


@given(ANSWERS)
def test_balanced_accuracy_and_its_error_agree_with_other_libraries(answers: list[tuple[bool, bool]]) -> None:
    found = balanced_accuracy(answers)
    right = [truth for truth, _ in answers]
    if len({*right}) < 2:
        assert found is None
        return
    assert found is not None
    assert found[0] == pytest.approx(balanced_accuracy_score(right, [given for _, given in answers]))
    variances = []
    for wanted in (True, False):
        hits = [given == truth for truth, given in answers if truth == wanted]
        variances.append(beta(1 + sum(hits), 1 + len(hits) - sum(hits)).var())
    assert found[1] == pytest.approx((sum(variances) / 4) ** 0.5)


def test_the_error_is_the_spread_of_repeated_scores() -> None:
    rng = random.Random(0)
    scores, errors = [], []
    for _ in range(2000):
        answers = [(truth, truth == (rng.random() < 0.75)) for truth in (True, False) for _ in range(40)]
        value, error = balanced_accuracy(answers) or (0.0, 0.0)
        scores.append(value)
        errors.append(error)
    assert statistics.fmean(scores) == pytest.approx(0.75, abs=0.005)
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(scores), rel=0.05)

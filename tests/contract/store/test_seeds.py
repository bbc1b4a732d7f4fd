"""Tests for sweeps over seeds, which are one experiment rather than a contest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.runs.spread_words import spread_words
from trainer.contract.settings.series import series_named
from trainer.contract.store.metrics_store import best_sae, value_of_sae
from trainer.contract.store.seeds import Spread, as_json, seeds_in, spread_of, without_seed

LABELS = ["k=16,seed=0", "k=16,seed=1", "k=32,seed=0", "k=32,seed=1"]


def latest(**fvu: float) -> dict[str, float]:
    return {f"fvu@{name.replace('_', '=')}": value for name, value in fvu.items()}


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_the_mean_and_the_standard_deviation_match_numpy(values: list[float]) -> None:
    spread = spread_of(values)
    assert spread is not None
    assert spread.n == len(values)
    assert spread.mean == pytest.approx(np.mean(values), rel=1e-9, abs=1e-6)
    assert spread.sd == pytest.approx(np.std(values, ddof=1), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("values", [[], [0.1], [0.1, float("nan")], [0.1, float("inf")]])
def test_without_two_finite_values_there_is_no_spread(values: list[float]) -> None:
    assert spread_of(values) is None


@pytest.mark.parametrize(
    ("label", "group"),
    [
        ("seed=0", ""),
        ("k=16,seed=1", "k=16"),
        ("k=16,seed=1,lr=0.1", "k=16,lr=0.1"),
        ("k=16", "k=16"),
        ("", ""),
        ("b_dec_init=mean,seed=12", "b_dec_init=mean"),
    ],
)
def test_a_seed_is_removed_from_a_label(label: str, group: str) -> None:
    assert without_seed(label) == group


def test_a_runs_values_are_means_over_its_seeds_and_no_seed_is_the_best() -> None:
    found = latest(seed_0=0.30, seed_1=0.10, seed_2=0.20) | {"fvu": 0.30, "lr@seed=0": 0.1, "lr": 0.1}
    assert best_sae(found) == "seed=0"
    assert value_of_sae(found, "fvu", "seed=0") == pytest.approx(0.2)
    seeds = seeds_in(found, "seed=0")
    assert seeds is not None
    assert (seeds.labels, seeds.are_all) == (("seed=0", "seed=1", "seed=2"), True)
    assert as_json(seeds)["figures"] == {"fvu": {"mean": pytest.approx(0.2), "sd": pytest.approx(0.1), "n": 3}}


def test_saes_that_differ_in_more_than_the_seed_are_ranked_by_their_mean_over_the_seeds() -> None:
    values = dict(zip(LABELS, (0.10, 0.40, 0.22, 0.20), strict=True))
    found = {f"heldout_fvu@{label}": value for label, value in values.items()}
    # k=16 has the lowest individual value, but k=32 has the lower mean.
    assert best_sae(found) == "k=32,seed=0"
    assert value_of_sae(found, "heldout_fvu", "k=32,seed=0") == pytest.approx(0.21)
    seeds = seeds_in(found, "k=32,seed=0")
    assert seeds is not None
    assert (seeds.labels, seeds.are_all) == (("k=32,seed=0", "k=32,seed=1"), False)


def test_a_group_with_a_seed_that_failed_is_ranked_after_complete_groups() -> None:
    found = {"heldout_fvu@k=4,seed=1": 0.10, "heldout_fvu@k=8,seed=0": 0.11, "heldout_fvu@k=8,seed=1": 0.11}
    assert best_sae(found) == "k=4,seed=1"
    found["fvu@k=4,seed=0"] = 9.0
    assert best_sae(found) == "k=8,seed=0"
    del found["heldout_fvu@k=8,seed=0"], found["heldout_fvu@k=8,seed=1"]
    seeds = seeds_in(found, best_sae(found))
    assert seeds is not None
    assert seeds.count_words == "1 of 2 seeds"


def test_the_lowest_seed_comes_first() -> None:
    found = latest(seed_10=0.1, seed_9=0.2, seed_2=0.3)
    assert best_sae(found) == "seed=2"
    seeds = seeds_in(found, "seed=10")
    assert seeds is not None
    assert seeds.labels == ("seed=2", "seed=9", "seed=10")
    assert seeds.count_words == "3 seeds"


@pytest.mark.parametrize("found", [{}, {"fvu": 0.1}, latest(k_16=0.1, k_32=0.2), latest(seed_0=0.1)])
def test_runs_without_several_seeds_have_no_spread(found: dict[str, float]) -> None:
    assert seeds_in(found, best_sae(found)) is None


@pytest.mark.parametrize(
    ("mean", "sd", "words"),
    [
        (0.146023, 0.001511, "0.1460 ± 0.0015"),
        (7.933, 0.0169, "7.933 ± 0.017"),
        (123.4, 17.2, "123 ± 17"),
        (0.25, 0.0, "0.25 ± 0"),
        (8.0, 1.2e-7, "8 ± 1.2e-07"),
        (3e28, 2e28, "3e+28 ± 2e+28"),
    ],
)
def test_a_spread_is_shown_with_two_digits_of_the_standard_deviation(mean: float, sd: float, words: str) -> None:
    assert spread_words(Spread(mean, sd, 3), series_named("fvu")) == words


def test_the_spread_of_a_share_is_in_percent() -> None:
    assert spread_words(Spread(0.013, 0.002, 3), series_named("dead_fraction"), "±") == "1.3%±0.2%"

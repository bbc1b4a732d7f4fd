from __future__ import annotations

import math
import random

import numpy as np
import pytest

from sae_tui.jobs.view.quality import (
    Curve,
    FvuEstimate,
    PastRun,
    QualityRecipe,
    at_end,
    doubled,
    least_squares,
    mean_of,
    since_rise,
    t_quantile,
    thinned,
    value_at,
)

SIZES = {"k": 32, "tokens": 100_000, "d_sae": 1024}


def recipe(lr: float = 1.0, data: str = "rows", kind: str = "topk", **sizes: float) -> QualityRecipe:
    return QualityRecipe(kind=(kind,), lr=lr, data=data, total_steps=100, sizes={**SIZES, **sizes})


def run(halfway: float, gain: float, **settings: float | str) -> PastRun:
    """Return a run whose FVU is multiplied by `gain` from half of its steps to the end."""
    return PastRun(recipe(**settings), ((0.25, 2 * halfway), (0.5, halfway), (1.0, gain * halfway)))


def students_t(degrees: int) -> float:
    from scipy import stats

    return float(stats.t.ppf(0.9, degrees))


def now(fvu: float, share: float = 0.5) -> Curve:
    return ((share / 2, 2 * fvu), (share, fvu))


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 10, 30])
def test_quantiles_of_students_t_agree_with_scipy(degrees):
    assert t_quantile(0.9, degrees) == pytest.approx(students_t(degrees), rel=4e-3)


@pytest.mark.parametrize(("n", "columns"), [(3, 0), (6, 1), (9, 3)])
def test_a_fit_and_its_bands_agree_with_numpy(n, columns):
    rng = np.random.default_rng(0)
    x, new = rng.normal(3, 2, (n, columns)), rng.normal(3, 2, columns)
    y = rng.normal(0, 1, n) + x.sum(1)
    design, at = np.column_stack([np.ones(n), x]), np.concatenate([[1], new])
    beta, (squares,), *_ = np.linalg.lstsq(design, y, rcond=None)
    degrees = n - 1 - columns
    error = math.sqrt(squares / degrees * (1 + at @ np.linalg.inv(design.T @ design) @ at))
    fit = least_squares(x.tolist(), y.tolist())
    assert fit.slopes == pytest.approx(beta[1:].tolist())
    assert fit.predict(new.tolist()) == pytest.approx((at @ beta, students_t(degrees) * error), rel=4e-3)


def test_settings_that_always_change_together_cannot_be_separated():
    assert least_squares([[x, 3 * x] for x in (1.0, 2.0, 4.0, 7.0, 8.0)], [1.0, 2.0, 3.0, 4.0, 5.0]) is None


def test_a_curve_is_interpolated_along_a_power_law():
    curve = tuple((share, share**-0.5) for share in (0.1, 0.4, 1.0))
    assert value_at(curve, 0.2) == pytest.approx(0.2**-0.5)
    assert value_at(curve, 1.0) == 1.0
    assert value_at(curve, 0.05) is None


def test_the_final_value_is_forecast_from_the_same_share_of_past_runs():
    past = [run(0.2, gain) for gain in (0.80, 0.82, 0.84)]
    found = at_end(recipe(), now(0.3), past)
    logs = np.log([0.80, 0.82, 0.84])
    half = students_t(2) * logs.std(ddof=1) * math.sqrt(1 + 1 / 3)
    assert found.heldout_fvu == pytest.approx(0.3 * math.exp(logs.mean()))
    assert math.log(found.high / found.low) / 2 == pytest.approx(half, rel=4e-3)
    assert found.past_runs == 3


def test_the_current_slope_of_a_curve_does_not_change_its_forecast():
    past = [run(0.2, gain) for gain in (0.80, 0.82, 0.84)]
    flat, steep = ((0.25, 0.3), (0.5, 0.3)), ((0.25, 0.9), (0.5, 0.3))
    assert at_end(recipe(), flat, past) == at_end(recipe(), steep, past)


def test_the_forecast_follows_how_the_gain_depends_on_k():
    past = [run(0.2, 0.7 * k**0.05, k=k) for k in (8, 16, 16, 32, 64)]
    assert at_end(recipe(k=32), now(0.3), past).heldout_fvu == pytest.approx(0.3 * 0.7 * 32**0.05)


@pytest.mark.parametrize(
    "others",
    [{"k": 8, "d_sae": 8192}, {"k": 8, "tokens": 1_000_000}, {"tokens": 1_000_000}],
    ids=["another k and d_sae", "another k and length", "another length"],
)
@pytest.mark.parametrize("n_others", [1, 2, 3, 6])
def test_dissimilar_runs_do_not_take_a_forecast_away(others, n_others):
    similar = [run(0.2, gain) for gain in (0.80, 0.82, 0.84)]
    dissimilar = [run(0.3, 0.7 + 0.01 * i, **others) for i in range(n_others)]
    found = at_end(recipe(), now(0.3), [*similar, *dissimilar])
    assert found.heldout_fvu == pytest.approx(at_end(recipe(), now(0.3), similar).heldout_fvu, rel=0.01)


def test_a_setting_that_hardly_varies_between_similar_runs_is_not_fitted():
    similar = [run(0.2, gain, k=k) for gain, k in ((0.80, 32), (0.82, 31), (0.83, 33), (0.84, 34))]
    dissimilar = run(0.3, 0.7, k=8, tokens=1_000_000, d_sae=8192)
    assert at_end(recipe(k=60), now(0.3), [*similar, dissimilar]) == at_end(recipe(k=60), now(0.3), similar)


def test_extreme_values_are_forecast_without_an_error():
    past = [PastRun(recipe(), ((0.25, 1e100), (0.5, 1e100), (1.0, 1e-300)))] * 3
    assert at_end(recipe(), now(0.3), past).heldout_fvu == 0.0


def test_a_curve_is_cut_before_its_last_clear_rise():
    falling = ((0.1, 0.5), (0.2, 0.4), (0.3, 0.41), (0.4, 0.35))
    assert since_rise(falling) == falling
    assert since_rise((*falling, (0.5, 0.37), (0.6, 0.2), (0.7, 0.3), (1.0, 0.1))) == ((0.7, 0.3), (1.0, 0.1))


@pytest.mark.parametrize("n", [0, 1, 99, 100, 101, 150, 2000])
def test_a_thinned_curve_keeps_its_ends_and_different_points_in_order(n):
    curve = tuple((float(i), 1.0) for i in range(1, n + 1))
    found = thinned(curve, 100)
    assert len(found) == min(n, 100)
    assert (found[:1], found[-1:]) == (curve[:1], curve[-1:])
    assert sorted(set(found)) == list(found)


@pytest.mark.parametrize(
    ("curve", "past"),
    [
        (now(0.3), [run(0.2, 0.8)] * 2),
        ((), [run(0.2, 0.8)] * 5),
        (now(0.3, share=0.1), [run(0.2, 0.8)] * 5),
        (now(0.3), [run(0.2, 0.8, k=128)] * 5),
        (now(0.3), [run(0.2, 0.8, tokens=tokens) for tokens in (1e6, 1e7, 1e6, 1e7, 1e6)]),
    ],
    ids=["two runs", "no value yet", "earlier than all past values", "another k", "far shorter than all past runs"],
)
def test_without_enough_similar_runs_there_is_no_forecast(curve, past):
    assert at_end(recipe(), curve, past) is None


@pytest.mark.parametrize(
    ("other", "is_like"),
    [({"lr": 1.3}, True), ({"lr": 0.33}, False), ({"lr": 2.0}, False), ({"kind": "gated"}, False), ({"k": 8}, True)],
)
def test_runs_with_another_schedule_or_learning_rate_are_not_similar(other, is_like):
    assert recipe().is_like(recipe(**other)) == is_like


@pytest.mark.parametrize("n_past", [3, 5, 10])
def test_four_of_five_bands_contain_the_final_value(n_past):
    rng = random.Random(n_past)
    hits = 0
    for _ in range(2000):
        *past, last = [run(0.2, 0.8 * math.exp(rng.gauss(0, 0.03))) for _ in range(n_past + 1)]
        found = at_end(recipe(), last.curve[:-1], past)
        hits += found.low <= last.final <= found.high
    assert hits / 2000 == pytest.approx(0.8, abs=0.03)


def by_law(noise: float = 0.0, **sizes: float) -> PastRun:
    settings = recipe(**sizes)
    k, tokens, d_sae = settings.sizes.values()
    fvu = 3 * k**-0.4 * tokens**-0.1 * d_sae**-0.2 * math.exp(noise)
    return PastRun(settings, ((0.5, 1.2 * fvu), (1.0, fvu)))


BASE = FvuEstimate(0.2, 0.2, 0.2, 1)
GRID = [
    (8, 1e5, 512),
    (16, 2e5, 1024),
    (32, 4e5, 512),
    (64, 1e5, 1024),
    (32, 2e5, 2048),
    (16, 4e5, 2048),
    (8, 2e5, 512),
]


def test_doubling_a_setting_follows_the_power_law_of_past_runs():
    past = [by_law(k=k, tokens=tokens, d_sae=d_sae) for k, tokens, d_sae in GRID]
    found = doubled(recipe(), BASE, past)
    slopes = {"k": -0.4, "tokens": -0.1, "d_sae": -0.2}
    assert {name: one.heldout_fvu for name, one in found.items()} == {
        name: pytest.approx(0.2 * 2**slope) for name, slope in slopes.items()
    }
    assert {one.past_runs for one in found.values()} == {7}


def test_a_noisy_law_and_an_uncertain_base_widen_the_band():
    rng = random.Random(0)
    past = [by_law(rng.gauss(0, 0.02), k=k) for k in (8, 16, 32, 64, 32, 16)]
    exact = doubled(recipe(), BASE, past)["k"]
    unsure = doubled(recipe(), FvuEstimate(0.2, 0.18, 0.22, 1), past)["k"]
    assert unsure.low < exact.low < exact.heldout_fvu == unsure.heldout_fvu < exact.high < unsure.high


@pytest.mark.parametrize(
    "past",
    [
        [by_law(k=k) for k in (16, 32, 64)],
        [by_law(k=k) for k in (24, 32, 40, 40, 24, 32)],
        [by_law(k=k, data="others") for k in (16, 32, 64, 32, 16)],
        [by_law(k=k) for k in (2, 4, 8, 16, 8, 4)],
        [],
    ],
    ids=["too few runs", "too similar", "other data", "smaller settings than now", "none"],
)
def test_without_enough_different_runs_on_the_data_there_is_no_law(past):
    assert doubled(recipe(k=32), BASE, past) == {}


def test_the_forecasts_for_several_seeds_are_averaged():
    assert mean_of([FvuEstimate(0.2, 0.1, 0.3, 5), FvuEstimate(0.4, 0.3, 0.7, 4)]) == FvuEstimate(
        *map(pytest.approx, (0.3, 0.2, 0.5)), 4
    )

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sae_tui.compare.lines import SMOOTHING, CurveView, ema, log_ticks, ticks, traces
from sae_tui.compare.run import Curve, Sample

SAMPLES = (Sample(10, 1000.0, 1.5, 4.0), Sample(20, 2000.0, 3.0, None), Sample(30, 3000.0, 4.5, 0.0))


@given(st.lists(st.floats(-1e6, 1e6), max_size=30), st.sampled_from(SMOOTHING))
def test_smoothing_is_a_weighted_mean_of_all_values_so_far(values, smoothing) -> None:
    def weighted_mean(newest: int) -> float:
        weights = [smoothing ** (newest - place) for place in range(newest + 1)]
        return sum(weight * value for weight, value in zip(weights, values, strict=False)) / sum(weights)

    assert ema(values, smoothing) == pytest.approx([weighted_mean(place) for place in range(len(values))], abs=1e-6)


def test_without_smoothing_values_are_unchanged() -> None:
    assert ema([3.0, 1.0, 2.0], 0.0) == [3.0, 1.0, 2.0]


@given(st.floats(-1e9, 1e9), st.floats(1e-3, 1e9))
def test_ticks_are_round_numbers_evenly_spaced_within_the_range(low, width) -> None:
    assume(width > 1e-9 * abs(low))  # in narrower ranges, the ticks would be too close together for float precision
    positions = ticks(low, low + width)
    assert 2 <= len(positions) <= 8
    assert all(low - width * 1e-6 <= tick <= low + width * (1 + 1e-6) for tick in positions)
    steps = [after - before for before, after in itertools.pairwise(positions)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=1e-3)


def test_log_ticks_are_powers_of_ten_or_finer_in_a_short_range() -> None:
    assert log_ticks(0.001, 100.0) == pytest.approx([0.001, 0.01, 0.1, 1, 10, 100])
    assert log_ticks(0.15, 2.5) == pytest.approx([0.2, 0.5, 1, 2])
    assert log_ticks(0.34, 0.36) == [0.34, 0.36]


@pytest.mark.parametrize(("axis", "xs"), [("step", (10, 30)), ("tokens", (1000, 3000)), ("time", (1.5, 4.5))])
def test_a_trace_uses_the_requested_axis_and_omits_missing_values(axis, xs) -> None:
    (trace,) = traces([Curve("7", 0, SAMPLES)], CurveView(axis=axis))
    assert trace.points == tuple(zip(xs, (4.0, 0.0), strict=True))


def test_a_logarithmic_scale_omits_values_without_a_logarithm() -> None:
    (trace,) = traces([Curve("7", 0, SAMPLES)], CurveView(log=True))
    assert trace.points == ((10.0, 4.0),)
    assert math.isfinite(trace.newest)

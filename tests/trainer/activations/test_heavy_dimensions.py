"""Tests for finding heavy dimensions: the few dimensions that together account for over half of the variance."""

from __future__ import annotations

import pytest
import torch

from trainer.activations.heavy_dimensions import heavy_dimensions, moments


def variance(d_in: int, **heavy: float) -> torch.Tensor:
    values = torch.ones(d_in, dtype=torch.float64)
    for number, value in heavy.items():
        values[int(number.removeprefix("at_"))] = value
    return values


def test_the_smallest_set_of_dimensions_with_over_half_of_the_variance_is_named() -> None:
    found = heavy_dimensions(variance(600, at_7=500.0, at_3=900.0, at_5=20.0))
    assert found is not None
    assert found.numbers == [3, 7]
    assert found.share == pytest.approx(1400 / (597 + 1420))
    assert found.sentence() == "2 dimensions of 600 (numbers 3 and 7) account for 69.4 % of the variance"


def test_no_dimension_is_heavy_if_over_one_percent_of_all_dimensions_are_needed() -> None:
    assert heavy_dimensions(variance(200, at_3=90.0, at_5=90.0, at_9=90.0)) is None
    assert heavy_dimensions(variance(200)) is None
    assert heavy_dimensions(torch.zeros(200)) is None


def test_with_few_dimensions_a_single_one_may_account_for_half_of_the_variance() -> None:
    assert heavy_dimensions(variance(4, at_1=9.0)) is None
    assert heavy_dimensions(variance(16, at_1=99.0)) is not None


def test_all_heavy_dimensions_are_counted_but_only_the_first_few_are_named() -> None:
    found = heavy_dimensions(variance(1000, **{f"at_{number}": 300.0 - number for number in range(8)}))
    assert found is not None
    assert found.sentence().startswith("6 dimensions of 1000 (numbers 0, 1, 2, 3 and 2 more) account for 53.1 %")


def test_moments_match_those_computed_over_all_rows_at_once() -> None:
    rows = torch.randn(9000, 5, generator=torch.Generator().manual_seed(0)) + 100
    mean, spread = moments(rows)
    assert torch.allclose(mean, rows.double().mean(0))
    assert torch.allclose(spread, rows.double().var(0, correction=0))

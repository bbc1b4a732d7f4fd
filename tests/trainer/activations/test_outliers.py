"""Tests that bad rows are found by norm, replaced in batches, excluded from measurements, and counted by reason."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from trainer.activations.outliers import LeftOut, Outliers

# Maps a row's norm to the reason for dropping the row, or to "" if the row is kept.
REASONS = {1.0: "", 100.0: "outliers", float("nan"): "not_finite", float("inf"): "not_finite", 0.0: "zero"}


def rows_of_norm(norms: list[float]) -> Tensor:
    """Return rows [n, 3] with the given norms, each in a different direction."""
    directions = torch.nn.functional.normalize(torch.randn(len(norms), 3, generator=torch.Generator().manual_seed(0)))
    return directions * torch.tensor(norms)[:, None]


def test_only_rows_beyond_a_multiple_of_the_median_norm_are_outliers() -> None:
    x = rows_of_norm([1.0, 1.0, 1.0, 9.9, 10.1, 1.0, 170.0])
    stay = [True, True, True, True, False, True, False]
    assert Outliers(x, x, times=10.0).ordinary(x, x).tolist() == stay


@pytest.mark.parametrize("drops_zero", [False, True])
@given(norms=st.lists(st.sampled_from([1.0, 1.0, 1.0, *REASONS]), min_size=1, max_size=40))
def test_a_dropped_row_is_counted_and_replaced_by_the_nearest_earlier_row(drops_zero: bool, norms: list[float]) -> None:
    sample, x = rows_of_norm([1.0] * 5), rows_of_norm(norms)
    outliers = Outliers(sample, sample, times=10.0, drops_zero=drops_zero)
    replaced, targets = outliers.replace(x, x)
    outliers.note(len(x))
    assert targets is replaced
    assert len(replaced) == len(x)
    reasons = ["" if reason == "zero" and not drops_zero else reason for reason in map(_reason, norms)]
    expected = LeftOut(*(reasons.count(name) for name in LeftOut._fields[:3]), len(norms))
    assert LeftOut.of(outliers.counts) == outliers.count(x, x) == expected
    stay = [index for index, reason in enumerate(reasons) if not reason]
    assert torch.equal(outliers.leave_out(x, x)[0], x[stay])
    for index in range(len(norms) if stay else 0):
        nearest = next(index - back for back in range(len(norms)) if not reasons[index - back])
        assert torch.equal(replaced[index], x[nearest])


def _reason(norm: float) -> str:
    return "not_finite" if norm != norm else REASONS[norm]


def test_a_row_and_its_target_are_dropped_together() -> None:
    sample = rows_of_norm([1.0] * 5)
    x, y = rows_of_norm([1.0, 100.0, 1.0, 1.0, 1.0]), rows_of_norm([2.0, 2.0, 2.0, 90.0, 2.0])
    y[4, 2] = torch.nan
    outliers = Outliers(sample, 2 * sample, times=10.0)
    outliers.note(len(x))
    inputs, targets = outliers.replace(x, y)
    assert torch.equal(inputs, x[[0, 0, 2, 2, 2]])
    assert torch.equal(targets, y[[0, 0, 2, 2, 2]])
    kept_x, kept_y = outliers.leave_out(x, y)
    assert torch.equal(kept_x, x[[0, 2]])
    assert torch.equal(kept_y, y[[0, 2]])
    assert LeftOut.of(outliers.counts) == LeftOut(outliers=2, not_finite=1, zero=0, n_seen=5)


def test_outliers_are_found_even_if_most_rows_are_zero() -> None:
    sample, x = rows_of_norm([0.0] * 7 + [1.0] * 3), rows_of_norm([1.0, 0.0, 170.0])
    assert Outliers(sample, sample, times=10.0).ordinary(x, x).tolist() == [True, True, False]


def test_without_a_limit_only_rows_outside_the_fp32_range_are_dropped() -> None:
    x = rows_of_norm([1.0, 1e6, 1e10])
    sample = rows_of_norm([1.0] * 5)
    assert Outliers(sample, sample, times=0.0).ordinary(x, x).tolist() == [True, True, False]
    zeros = torch.zeros(5, 3)
    assert torch.equal(Outliers(zeros, zeros, times=10.0).replace(x, x)[0], x)

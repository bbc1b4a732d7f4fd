"""Rows of enormous norm: found by the median, replaced without a change of shape, left out of measurements."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor

from trainer.activations.outliers import Outliers


def rows_of_norm(norms: list[float]) -> Tensor:
    """Return rows [n, 3] of these norms, each of a direction of its own."""
    directions = torch.nn.functional.normalize(torch.randn(len(norms), 3, generator=torch.Generator().manual_seed(0)))
    return directions * torch.tensor(norms)[:, None]


def test_only_rows_of_more_than_so_many_times_the_median_norm_are_outliers() -> None:
    x = rows_of_norm([1.0, 1.0, 1.0, 9.9, 10.1, 1.0, 170.0])
    outliers = Outliers(x, x, times=10.0)
    assert outliers.among(x, x).tolist() == [False, False, False, False, True, False, True]


@given(st.lists(st.sampled_from([1.0, 1.0, 1.0, 100.0]), min_size=1, max_size=40))
def test_an_outlier_becomes_the_nearest_ordinary_row_before_it_in_a_ring(norms: list[float]) -> None:
    sample, x = rows_of_norm([1.0] * 5), rows_of_norm(norms)
    replaced, targets = Outliers(sample, sample, times=10.0).replace(x, x)
    assert targets is replaced
    assert len(replaced) == len(x)
    if 1.0 not in norms:
        return
    for index in range(len(norms)):
        nearest = next(index - back for back in range(len(norms)) if norms[index - back] == 1.0)
        assert torch.equal(replaced[index], x[nearest])


def test_rows_that_are_not_finite_are_left_for_those_who_report_them() -> None:
    sample, x = rows_of_norm([1.0] * 5), rows_of_norm([1.0, 100.0, 1.0, 1.0])
    x[0, 0], x[2, 1] = float("nan"), float("inf")
    outliers = Outliers(sample, sample, times=10.0)
    assert outliers.among(x, x).tolist() == [False, True, False, False]
    assert outliers.replace(x, x)[0].isfinite().all(dim=1).tolist() == [False, False, False, True]


def test_a_row_goes_with_its_target_and_either_may_be_the_outlier() -> None:
    sample = rows_of_norm([1.0] * 5)
    x, y = rows_of_norm([1.0, 100.0, 1.0, 1.0]), rows_of_norm([2.0, 2.0, 2.0, 90.0])
    outliers = Outliers(sample, 2 * sample, times=10.0)
    outliers.note(len(x))
    inputs, targets = outliers.replace(x, y)
    assert torch.equal(inputs, x[[0, 0, 2, 2]])
    assert torch.equal(targets, y[[0, 0, 2, 2]])
    kept_x, kept_y = outliers.leave_out(x, y)
    assert torch.equal(kept_x, x[[0, 2]])
    assert torch.equal(kept_y, y[[0, 2]])
    assert outliers.counts.tolist() == [2, 4]


def test_nothing_is_left_out_where_no_limit_is_asked_for_or_the_median_is_zero() -> None:
    x = rows_of_norm([1.0, 1e6])
    assert Outliers(x, x, times=0.0).replace(x, x)[0] is x
    zeros = torch.zeros(5, 3)
    assert torch.equal(Outliers(zeros, zeros, times=10.0).replace(x, x)[0], x)

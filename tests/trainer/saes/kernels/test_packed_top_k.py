"""Checks the selection of each row's largest bf16 values against a full sort."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.saes.kernels import packed_top_k
from trainer.saes.kernels.packed_top_k import largest_of_each


@pytest.fixture(autouse=True, scope="module")
def groups_of_groups() -> Iterator[None]:
    """Lower the column limit so that even short rows are divided into nested groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_top_k, "AT_ONCE", 16)
        yield


def test_many_columns_are_searched_in_nested_groups() -> None:
    levels = packed_top_k._levels(torch.zeros(2, 768, dtype=torch.int16), 2)
    assert [level.shape[1] for level in levels] == [768, 96, 32, 16]


@given(st.integers(0, 30), st.integers(1, 400), st.integers(1, 80), st.booleans(), st.integers(0, 2**31))
@settings(max_examples=150)
def test_the_largest_positive_values_match_a_full_sort(n_rows: int, n: int, k: int, has_ties: bool, seed: int) -> None:
    k = min(k, n)
    values = torch.rand(n_rows, n, generator=torch.Generator().manual_seed(seed)) + 0.5
    values = ((8 * values).round() if has_ties else values).bfloat16()
    columns, largest = largest_of_each(values, k)
    assert all(len(set(row)) == k for row in columns.tolist())
    assert torch.equal(values.gather(1, columns).float(), largest)
    assert torch.equal(largest[:, 0], largest.amin(dim=1))
    ordered = largest.sort(dim=1, descending=True).values
    assert torch.equal(ordered, values.float().sort(dim=1, descending=True).values[:, :k])


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=100)
def test_all_positive_values_are_found_in_rows_that_have_few_of_them(n: int, k: int, seed: int) -> None:
    k = min(k, n)
    values = torch.randn(20, n, generator=torch.Generator().manual_seed(seed)).bfloat16()
    columns, largest = largest_of_each(values, k)
    assert all(len(set(row)) == k for row in columns.tolist())
    assert torch.equal(values.gather(1, columns).float(), largest)
    expected = values.float().sort(dim=1, descending=True).values[:, :k]
    assert torch.equal(largest.relu().sort(dim=1, descending=True).values, expected.relu())
    # The first value returned for a row is the smallest of the k largest, or any non-positive value.
    assert torch.equal(largest[:, 0] > 0, expected[:, -1] > 0)


@pytest.mark.parametrize("n", [2**16, 2**16 + 8])
def test_column_numbers_that_exceed_16_bits_are_distinguished(n: int) -> None:
    values = torch.zeros(2, n).bfloat16()
    values[0, [0, 9, n - 1]] = torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    values[1, [n - 2, n - 3, 5]] = torch.tensor([1.0, 1.0, 1.0]).bfloat16()
    columns, _ = largest_of_each(values, 3)
    assert [sorted(row) for row in columns.tolist()] == [[0, 9, n - 1], [5, n - 3, n - 2]]

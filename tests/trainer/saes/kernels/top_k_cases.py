"""Checks the top-k kernels against a full sort.

`test_triton_top_k.py` runs this file in a separate process. With TRITON_INTERPRET=1, kernels run on a CPU; otherwise
they need a GPU.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from support.combinations import ALL, combined, slow_except
from torch import Tensor

from trainer.saes.kernels import triton_top_k

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows(n_rows: int, n: int, seed: int = 0) -> Tensor:
    return torch.randn(n_rows, n, generator=torch.Generator().manual_seed(seed))


def some_cases() -> Iterator[pytest.param]:
    """Yield test cases, each consisting of rows and a k."""
    yield pytest.param(rows(3, 1000), 7, id="any numbers")
    yield pytest.param(rows(3, 1003), 40, id="a partly filled last group")
    yield pytest.param(rows(2, 5), 5, id="all values of a row shorter than a group")
    yield pytest.param(rows(2, 40), 33, id="k above the number of groups")
    yield pytest.param(rows(4, 500).round(), 64, id="many equal numbers")
    yield pytest.param(torch.zeros(2, 300), 20, id="only equal numbers")
    yield pytest.param(-rows(2, 300).abs() - 1, 20, id="only negative numbers")
    yield pytest.param(rows(2, 9000), 3, id="more columns than are read at once")
    yield pytest.param(rows(2, 777), 777, id="all values of a row of many groups")
    yield pytest.param(rows(3, 1003).sort(dim=1).values, 40, id="sorted numbers")
    yield pytest.param(
        rows(3, 700) * 10.0 ** (6 * rows(3, 700, seed=1)).clamp(-30, 30), 50, id="numbers of all magnitudes"
    )
    yield pytest.param(torch.arange(1000).expand(2, 1000) % 3 - 1.0, 334, id="many ties at the smallest value")
    few_positive = -rows(3, 400).abs()
    few_positive[:, ::11] *= -1
    yield pytest.param(few_positive, 36, id="one more positive number than k")
    yield pytest.param(few_positive, 30, id="several more positive numbers than k")
    odd = rows(6, 200)
    odd[0, ::3] = torch.nan
    odd[1, 7] = -torch.nan
    odd[2, :] = -torch.inf
    odd[2, [3, 150]] = 1.0
    odd[3, 5], odd[3, 6] = torch.inf, -torch.inf
    odd[4, ::2], odd[4, 1::2] = 0.0, -0.0
    odd[5] = torch.nan
    yield pytest.param(odd, 9, id="NaN, infinities and zeros of both signs")


CASES = [*some_cases()]
# The three kinds of results that a selection returns.
RESULTS = ("values", "kept", "marks")
COMBINED = combined(CASES, DTYPES, RESULTS)
# Cases that depend on the bit patterns of values and are tested with all dtypes.
OF_BITS = ("any numbers", "numbers of all magnitudes", "NaN, infinities and zeros of both signs")


def cases_of(result: str) -> pytest.MarkDecorator:
    """Parametrise a test with the cases and dtypes for one kind of result."""
    chosen = [
        pytest.param(*case.values, dtype, id=f"{case.id}-{dtype}")
        for case in CASES
        for dtype in DTYPES
        if case.id in OF_BITS or any(one[0] is case and one[1:] == (dtype, result) for one in COMBINED)
    ]
    return pytest.mark.parametrize(("values", "k", "dtype"), chosen)


def expected(values: Tensor, k: int) -> Tensor:
    """Return the columns of the k largest values in each row in float64, in ascending order of columns.

    NaN ranks highest, and ties go to the lowest columns. −0 ranks below +0, as in torch.topk on a GPU.
    """
    keys = values.double().nan_to_num(nan=1e300, posinf=1e299, neginf=-1e299)
    keys = torch.where((keys == 0) & values.signbit() & ~values.isnan(), -1e-300, keys)
    return keys.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values


@cases_of("values")
def test_the_largest_values_in_each_row_match_a_full_sort(values: Tensor, k: int, dtype: torch.dtype) -> None:
    values = values.to(dtype)
    columns, largest = triton_top_k.largest_of_each(values.to(DEVICE), k)
    assert torch.equal(columns.cpu(), expected(values, k))
    assert torch.equal(largest.cpu().nan_to_num(nan=7e4), values.gather(1, expected(values, k)).nan_to_num(nan=7e4))
    by_torch = values.double().topk(k, dim=1).values
    assert torch.equal(largest.cpu().double().sort(dim=1, descending=True).values.nan_to_num(), by_torch.nan_to_num())


@cases_of("kept")
def test_positive_values_among_the_largest_keep_their_places_and_others_become_0(
    values: Tensor, k: int, dtype: torch.dtype
) -> None:
    values = values.to(dtype)
    kept = triton_top_k.strongest(values.to(DEVICE), k).cpu()
    is_kept = torch.zeros_like(values, dtype=torch.bool).scatter(1, expected(values, k), True) & ~(values <= 0)
    assert torch.equal(kept.nan_to_num(nan=7e4), torch.where(is_kept, values, 0).nan_to_num(nan=7e4))


@cases_of("marks")
def test_the_largest_values_are_marked_and_the_smallest_of_them_is_returned(
    values: Tensor, k: int, dtype: torch.dtype
) -> None:
    values = values.to(dtype)
    marked, smallest = (one.cpu() for one in triton_top_k.are_largest(values.to(DEVICE), k))
    assert torch.equal(marked, torch.zeros_like(marked).scatter(1, expected(values, k), True))
    keys = values.double().nan_to_num(nan=1e300, posinf=1e299, neginf=-1e299)
    kth = keys.sort(dim=1, descending=True).values[:, k - 1]
    assert torch.equal(smallest.double().nan_to_num(nan=1e300, posinf=1e299, neginf=-1e299), kth)


@pytest.mark.parametrize("seed", range(30 if ALL else 15))
def test_random_rows_of_random_widths_match_a_full_sort(seed: int) -> None:
    chance = random.Random(seed)
    n = chance.choice([chance.randint(1, 40), chance.randint(41, 2500)])
    k = chance.choice([1, n, chance.randint(1, n)])
    values = rows(2, n, seed) * chance.choice([1e-3, 1.0, 100.0]) - chance.choice([0, 0, 1])
    if chance.random() < 0.5:
        values = values.round()
    odd = chance.choices([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0], k=3)
    for number, share in zip(odd, chance.choices([0.0, 0.01, 0.3, 1.0], weights=[5, 2, 2, 1], k=3), strict=True):
        values[torch.rand(2, n, generator=torch.Generator().manual_seed(seed)) < share] = number
    dtype = chance.choice(DTYPES)
    test_the_largest_values_in_each_row_match_a_full_sort(values, k, dtype)
    test_positive_values_among_the_largest_keep_their_places_and_others_become_0(values, k, dtype)
    test_the_largest_values_are_marked_and_the_smallest_of_them_is_returned(values, k, dtype)


@pytest.mark.parametrize(
    ("sizes", "kind", "dtype"),
    combined(
        [((4, 500), 31), ((3, 6000), 7), ((130, 3000), 2000), ((1, 2**12), 64), ((64, 64), 1)],
        ["any numbers", "many equal numbers", "only equal numbers", "negative numbers", "not finite"],
        DTYPES[:2],
    ),
    ids=str,
)
def test_the_largest_values_across_all_rows_match_a_full_sort(
    sizes: tuple[tuple[int, int], int], kind: str, dtype: torch.dtype
) -> None:
    shape, n = sizes
    values = rows(*shape)
    if kind == "not finite":
        flat = values.view(-1)
        flat[::101], flat[3::201], flat[5::301] = torch.inf, torch.nan, -torch.inf
    made = {
        "many equal numbers": values.round(),
        "only equal numbers": 0 * values,
        "negative numbers": -values.abs() - 1,
    }
    values = made.get(kind, values).to(dtype)
    assert triton_top_k.fits_all(values, n)
    found = triton_top_k.largest_of_all(values.to(DEVICE), n).cpu()
    assert torch.equal(found, found.unique())
    flat = values.flatten().double().nan_to_num(nan=1e300, posinf=1e299, neginf=-1e299)
    assert torch.equal(flat[found].sort().values, flat.sort().values[-n:])


@pytest.mark.parametrize("numbers", slow_except([None], [None, [1.0, 2.0, 3.0], [-2.0, -0.0, 0.0]]), ids=str)
def test_tiles_of_any_size_produce_the_same_result(
    numbers: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = rows(12, 512).round(decimals=1).bfloat16().to(DEVICE)
    if numbers is not None:
        # The bound is the second value, which occurs in all tiles but one. Its low bits are all 0, or all 1 for -0.0.
        indices = torch.arange(12 * 512, device=DEVICE).view(12, 512)
        values = torch.where(indices % 150 == 7, numbers[2], torch.where(indices // 64 == 3, numbers[0], numbers[1]))
        values = values.bfloat16()
    expected_ones = triton_top_k.largest_of_all(values, 75)
    # With these limits, the 12 tiles of maxima are counted by several programs and summed in several parts.
    monkeypatch.setattr(triton_top_k, "SHARED_TILE", 64)
    monkeypatch.setattr(triton_top_k, "COUNTS", 2)
    assert torch.equal(triton_top_k.largest_of_all(values, 75), expected_ones)


def test_groups_of_any_size_produce_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    values = rows(2, 700).bfloat16()
    monkeypatch.setattr(triton_top_k, "TILE_BYTES", 2048)
    for most in (4, 16, 64):
        monkeypatch.setattr(triton_top_k, "MOST_GROUPS", most)
        columns, _ = triton_top_k.largest_of_each(values.to(DEVICE), 11)
        assert torch.equal(columns.cpu(), expected(values, 11))


def test_non_contiguous_rows_are_read_correctly() -> None:
    values = rows(50, 4).bfloat16().T
    columns, _ = triton_top_k.largest_of_each(values.to(DEVICE), 5)
    assert torch.equal(columns.cpu(), expected(values, 5))


def test_sizes_that_the_kernels_do_not_support_are_left_to_torch() -> None:
    def fits(n_rows: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return triton_top_k.fits(torch.empty(n_rows, n, dtype=dtype, device="meta"), k)

    assert fits(4096, 65536, 64)
    assert fits(4096, 24576, 32, torch.float32)
    assert fits(4096, 2**18, 64)
    assert not fits(1, 65536, 64)
    assert not fits(4096, 2**19, 64)
    assert not fits(4096, 65536, 2000)
    # If a row fits in one program, k is unlimited.
    assert fits(4096, 8192, 8000)
    assert not fits(4096, 8193, 8000)
    assert not fits(4096, 65536, 0)
    assert not fits(4096, 65536, 64, torch.float64)

    def fits_all(n: int, shape: tuple[int, int] = (4096, 24576), dtype: torch.dtype = torch.bfloat16) -> bool:
        return triton_top_k.fits_all(torch.empty(shape, dtype=dtype, device="meta"), n)

    assert fits_all(4096 * 32)
    assert not fits_all(4096 * 32, dtype=torch.float32)
    assert not fits_all(4096 * 1000)
    assert not fits_all(0)
    assert not fits_all(32, (4095, 24577))
    assert not fits_all(4096 * 32, (2**16, 2**15))
    assert triton_top_k.fits_whole(torch.empty(4096, 2304, dtype=torch.bfloat16, device="meta"), 1152)
    assert not triton_top_k.fits_whole(torch.empty(4096, 20000, dtype=torch.bfloat16, device="meta"), 1152)


def test_a_matrix_without_rows_produces_an_empty_result() -> None:
    columns, largest = triton_top_k.largest_of_each(torch.empty(0, 64, device=DEVICE), 3)
    assert columns.shape == largest.shape == (0, 3)


def test_the_kernels_pass_their_own_trial() -> None:
    triton_top_k.try_out(DEVICE)


def test_a_trial_with_wrong_results_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_top_k, "strongest", lambda values, k: torch.zeros_like(values))
    with pytest.raises(RuntimeError, match="wrong results"):
        triton_top_k.try_out(DEVICE)

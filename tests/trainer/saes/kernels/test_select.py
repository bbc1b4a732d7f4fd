from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import k_per_batch, k_per_token, rounded_down, where
from trainer.saes.kernels.top_k import SAMPLE_ROWS, _by_groups, _topk, are_largest
from trainer.saes.sparse_acts import SparseIndices


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Draw pre-activations of any width, with or without ties, possibly mostly negative, and a k of at most d_sae."""
    n_tokens, d_sae = draw(st.integers(1, 200)), draw(st.sampled_from([1, 2, 7, 24, 64, 97]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(
        n_tokens, d_sae, generator=generator, dtype=draw(st.sampled_from([torch.float32, torch.float64]))
    )
    values = values * (1 + 9 * torch.rand(n_tokens, 1, generator=generator)) + draw(
        st.sampled_from([-20.0, -2.0, 0.0, 5.0])
    )
    if draw(st.booleans()):
        values = values.round()
    if draw(st.booleans()):
        values = values.bfloat16()
    return values, draw(st.integers(1, d_sae))


def assert_consistent(indices: SparseIndices, n_tokens: int) -> None:
    """Check that entries are unique and sorted by token, and that `starts` points to each token's first entry."""
    bounds = [*indices.starts.tolist(), len(indices.tokens)]
    assert len(indices.starts) == n_tokens
    assert indices.tokens.tolist() == [
        token for token in range(n_tokens) for _ in range(bounds[token], bounds[token + 1])
    ]
    assert len(set(zip(indices.tokens.tolist(), indices.latents.tolist(), strict=True))) == len(indices.tokens)


def values_at(pre_acts: Tensor, indices: SparseIndices) -> Tensor:
    return pre_acts[indices.tokens, indices.latents]


@settings(max_examples=60)
@given(matrices())
def test_the_k_largest_values_for_each_token_match_a_full_sort(case: tuple[Tensor, int]) -> None:
    pre_acts, k = case
    indices, values = k_per_token(PreActs(pre_acts), k)
    assert_consistent(indices, len(pre_acts))
    assert torch.equal(values, values_at(pre_acts, indices))
    largest = values.view(-1, k).sort(dim=1, descending=True).values
    assert torch.equal(largest, pre_acts.sort(dim=1, descending=True).values[:, :k])


@settings(max_examples=60)
@given(matrices())
def test_the_largest_values_in_a_batch_match_a_full_sort(case: tuple[Tensor, int]) -> None:
    pre_acts, k = case
    indices, values = k_per_batch(PreActs(pre_acts), k)
    assert_consistent(indices, len(pre_acts))
    assert torch.equal(values, values_at(pre_acts, indices))
    largest = values.sort(descending=True).values
    assert torch.equal(largest, pre_acts.flatten().sort(descending=True).values[: k * len(pre_acts)])


@settings(max_examples=30)
@given(matrices())
def test_entries_chosen_from_a_batch_are_ordered_by_latent_within_a_token(case: tuple[Tensor, int]) -> None:
    pre_acts, k = case
    indices, _ = k_per_batch(PreActs(pre_acts), k)
    flat = indices.tokens * pre_acts.shape[1] + indices.latents
    assert (flat.diff() > 0).all()


@settings(max_examples=60)
@given(matrices(), st.booleans())
def test_the_group_search_used_on_gpus_matches_a_full_sort(case: tuple[Tensor, int], has_nan: bool) -> None:
    values, k = case
    k = -(-k // 8)
    if has_nan:
        values[len(values) // 2, 0] = torch.nan
    for rows, n in ((values, k), (values.reshape(1, -1), k * len(values))):
        columns = _by_groups(rows, n, _topk)
        assert (columns.sort(dim=1).values.diff(dim=1) > 0).all()
        found = rows.gather(1, columns).sort(dim=1, descending=True).values
        expected = rows.sort(dim=1, descending=True).values[:, :n]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_gpu_searches_group_maxima_instead_of_all_columns() -> None:
    looked_at: list[int] = []

    def search(values: Tensor, k: int) -> Tensor:
        looked_at.append(values.numel())
        return _topk(values, k)

    values = torch.randn(4, 4096)
    columns = _by_groups(values, 16, search)
    assert torch.equal(columns.sort().values, values.topk(16).indices.sort().values)
    # The search reads the maxima of 256 groups of 16 columns, and then all values in 16 groups.
    assert looked_at == [4 * 256, 4 * 256]
    assert _by_groups(values, 0, search).shape == (4, 0)


def test_an_unrepresentative_sample_does_not_change_the_result() -> None:
    # The sample contains every 10th token, and these tokens have much larger values than all others.
    pre_acts = torch.randn(SAMPLE_ROWS * 10, 50)
    pre_acts[::10] += 100
    _, values = k_per_batch(PreActs(pre_acts), 20)
    expected = pre_acts.flatten().topk(20 * len(pre_acts)).values.sort().values
    assert torch.equal(values.sort().values, expected)


def test_a_fractional_k_per_token_is_rounded_over_the_batch() -> None:
    assert len(k_per_batch(PreActs(torch.randn(10, 30)), 2.55)[1]) == 26


@pytest.mark.parametrize("choice", [k_per_token, k_per_batch])
def test_a_nan_is_chosen_so_that_it_reaches_the_loss(choice: object) -> None:
    assert callable(choice)
    pre_acts = torch.randn(200, 64)
    pre_acts[17, 5] = float("nan")
    assert choice(PreActs(pre_acts), 2)[1].isnan().any()


def test_a_nan_is_among_the_largest_even_if_all_other_values_are_equal() -> None:
    values = torch.tensor([[float("nan"), 1.0, 1.0, 0.0]])
    is_chosen, _ = are_largest(values, 2)
    assert is_chosen[0, 0]
    assert int(is_chosen.sum()) == 2


@settings(max_examples=30)
@given(matrices())
def test_mask_indices_are_the_positions_of_true_entries(case: tuple[Tensor, int]) -> None:
    pre_acts, _ = case
    mask = pre_acts > pre_acts.flatten().sort().values[-max(1, pre_acts.numel() // 20)]
    indices = where(mask)
    if indices is None:
        assert int(mask.sum()) * 16 > mask.numel()
        return
    assert_consistent(indices, len(mask))
    chosen = torch.zeros_like(mask)
    chosen[indices.tokens, indices.latents] = True
    assert torch.equal(chosen, mask)


def test_a_mask_with_many_entries_is_left_to_a_dense_matmul() -> None:
    assert where(torch.ones(10, 10, dtype=torch.bool)) is None
    nothing = where(torch.zeros(10, 10, dtype=torch.bool))
    assert nothing is not None
    assert_consistent(nothing, 10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_comparing_any_16_bit_number_with_a_bound_rounded_down_is_exact(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(60, generator=generator) * 10.0 ** torch.randint(-40, 6, (60,), generator=generator)
    edges = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 65520.0, -65520.0, torch.inf, -torch.inf, torch.nan])
    bounds = torch.cat([near, edges, every[::997].float()])
    rounded = rounded_down(bounds, dtype)
    assert torch.equal(every[:, None] <= rounded, every[:, None].float() <= bounds)

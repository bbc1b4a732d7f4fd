"""Checks the largest values found by several ranks against the largest values in the full matrix."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.contract.planning import first_look
from trainer.contract.planning.activation_memory import MARGIN_PER_TOKEN
from trainer.contract.planning.first_look import Costs
from trainer.parallel.latents import Latents
from trainer.parallel.threads import Threads, on_all
from trainer.saes.kernels import rounded_top_k
from trainer.saes.kernels.pre_acts import PreActs, Product
from trainer.saes.kernels.select import Chosen
from trainer.saes.kernels.top_k_across_ranks import (
    k_per_batch,
    k_per_batch_of_layers,
    k_per_token,
    nth_largest,
)
from trainer.saes.sparse_acts import SparseIndices


def marked(indices: SparseIndices, shape: tuple[int, int]) -> Tensor:
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[indices.tokens, indices.latents] = True
    # No entry is repeated, and `starts` contains the index of each token's first entry.
    assert int(mask.sum()) == len(indices.latents)
    n = len(indices.latents) if indices.filled is None else int(indices.filled.n)
    assert torch.equal(indices.starts, torch.searchsorted(indices.tokens[:n], torch.arange(shape[0])))
    mask[indices.tokens[n:], indices.latents[n:]] = False
    return mask


def chosen_of(chosen: Chosen, pre_acts: Tensor) -> Tensor:
    indices, values = chosen
    mask = marked(indices, tuple(pre_acts.shape))
    assert torch.equal(values, pre_acts.where(mask, 0)[indices.tokens, indices.latents])
    return mask


def over_latents(
    pre_acts: Tensor, k: int, n_ranks: int, shares: list[float] | None = None, *, may_wait: bool = True
) -> tuple[Tensor, list[int]]:
    """Select among latents split across ranks. Return a mask [n_tokens, d_sae] and how many values each rank sent."""

    def choose(group: Threads) -> tuple[Tensor, Latents, int]:
        latents = Latents(pre_acts.shape[1], group, shares)
        own, sent = latents.part(pre_acts, 1), []
        for name in ("gather", "to_owners"):
            plain = getattr(group, name)
            setattr(group, name, lambda tensor, plain=plain: sent.append(tensor.numel()) or plain(tensor))
        return chosen_of(k_per_token(PreActs(own), k, group, may_wait=may_wait), own), latents, sum(sent)

    whole = torch.zeros_like(pre_acts, dtype=torch.bool)
    results = on_all(n_ranks, choose)
    for mask, latents, _ in results:
        whole[:, latents.own] = mask
    return whole, [sent for _, _, sent in results]


@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=80)
def test_the_k_largest_values_for_a_token_are_found_whichever_ranks_hold_them(
    n_ranks: int, n_tokens: int, d_sae: int, k: int, has_ties: bool, may_wait: bool, seed: int
) -> None:
    k, n_ranks = min(k, d_sae), min(n_ranks, d_sae)
    pre_acts = torch.randn(n_tokens, d_sae, generator=torch.Generator().manual_seed(seed))
    if has_ties:
        pre_acts = pre_acts.round()
    chosen, _ = over_latents(pre_acts, k, n_ranks, may_wait=may_wait)
    assert (chosen.sum(dim=1) == k).all()
    expected = pre_acts.sort(dim=1, descending=True).values[:, :k]
    largest = pre_acts[chosen].view(n_tokens, k).sort(dim=1, descending=True).values
    assert torch.equal(largest, expected)


def test_ranks_with_unequal_numbers_of_latents_find_the_same_values() -> None:
    pre_acts = torch.randn(30, 50)
    chosen, _ = over_latents(pre_acts, 8, 3, [8.0, 1.0, 3.0])
    expected = torch.zeros_like(chosen).scatter(1, pre_acts.topk(8, dim=1).indices, True)
    assert torch.equal(chosen, expected)


def test_a_rank_sends_few_candidates_and_sends_more_only_for_tokens_that_need_more() -> None:
    n_tokens, d_sae, k, n_ranks = 20, 256, 16, 8
    # Sorted values are dealt to the ranks in turn, so each rank holds equally many of the largest values.
    even = torch.randn(n_tokens, d_sae).sort(descending=True).values
    few = MARGIN_PER_TOKEN * k // n_ranks
    _, sent = over_latents(even, k, n_ranks)
    # For each token, a rank sends its candidates and an upper bound on the token's other values.
    assert sent == [n_tokens * (few + 1)] * n_ranks
    # One rank holds all of token 3's large values.
    uneven = even.clone()
    uneven[3, ::n_ranks] += 100
    chosen, sent = over_latents(uneven, k, n_ranks)
    assert sent == [n_tokens * (few + 1) + k] * n_ranks
    assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, uneven.topk(k, dim=1).indices, True))


@pytest.mark.parametrize("sizes", [[10, 10], [3, 17], [1, 2, 17]])
@pytest.mark.parametrize("gap", [0.0, 50.0])
@pytest.mark.parametrize("may_wait", [True, False])
def test_the_largest_values_in_a_batch_are_found_if_ranks_hold_different_tokens(
    sizes: list[int], gap: float, may_wait: bool
) -> None:
    pre_acts = torch.randn(20, 30)
    # A rank that holds nearly all of the largest values sends more candidates.
    pre_acts[:4] += gap
    parts = pre_acts.split(sizes)

    def choose(group: Threads) -> Tensor:
        own = parts[group.index]
        return chosen_of(k_per_batch(PreActs(own), 4.0, 20, group, may_wait=may_wait), own)

    chosen = torch.cat(on_all(len(sizes), choose))
    expected = torch.zeros(600, dtype=torch.bool)
    expected[pre_acts.flatten().topk(80).indices] = True
    assert torch.equal(chosen.flatten(), expected)


@pytest.mark.parametrize("sizes", [[20], [10, 10], [1, 2, 17]])
@pytest.mark.parametrize("gap", [0.0, 50.0])
@pytest.mark.parametrize("may_wait", [True, False])
def test_the_largest_values_over_all_layers_are_found(sizes: list[int], gap: float, may_wait: bool) -> None:
    layers = [torch.randn(20, 30), torch.randn(20, 12), torch.randn(20, 30)]
    # A layer that holds nearly all of the largest values sends more candidates.
    layers[2] += gap

    def choose(group: Threads) -> list[Tensor]:
        own = [layer.split(sizes)[group.index] for layer in layers]
        each = [partial(PreActs, one) for one in own]
        chosen = k_per_batch_of_layers(each, 4.0, 20, group, may_wait=may_wait)
        return [chosen_of(of_layer, one) for of_layer, one in zip(chosen, own, strict=True)]

    ranks = on_all(len(sizes), choose)
    found = torch.cat([torch.cat(parts).flatten() for parts in zip(*ranks, strict=True)])
    pre_acts = torch.cat([layer.flatten() for layer in layers])
    expected = torch.zeros_like(found)
    expected[pre_acts.topk(80).indices] = True
    assert torch.equal(found, expected)


def test_the_nth_largest_value_over_all_ranks_is_found() -> None:
    values = torch.randn(90)
    parts = values.split([5, 60, 25])
    # A rank's values may be spread over several tensors, some with fewer than n values.
    results = on_all(3, lambda group: nth_largest(parts[group.index].split(20), 17, group))
    assert results == [values.sort(descending=True).values[16]] * 3


@pytest.mark.parametrize(("shares", "n_looks"), [([1.0, 1.0], 2), ([40.0, 1.0], 1), ([1.0, 1.0, 1.0], 3)])
@pytest.mark.parametrize("is_on_one_machine", [True, False])
def test_a_rounded_first_pass_on_several_ranks_matches_the_exact_matmul(
    shares: list[float], n_looks: int, is_on_one_machine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Threads, "is_on_one_machine", is_on_one_machine)
    monkeypatch.setattr(first_look, "costs", lambda: Costs(0.2, 10))
    looked, plain = [], rounded_top_k.look
    monkeypatch.setattr(rounded_top_k, "look", lambda *given: looked.append(given) or plain(*given))
    x, weights, k = torch.randn(200, 24), torch.randn(1200, 24), 8
    # Rounding makes many latents' pre-activations equal, so some tokens need exact values.
    weights[7:900:2] = weights[7] + 1e-6 * torch.randn(447, 24)
    pre_acts = x @ weights.T

    def choose(group: Threads) -> tuple[Tensor, Latents]:
        latents = Latents(1200, group, shares)
        own = latents.part(weights, 0)
        product = Product(x, own.T, torch.zeros(len(own)))
        indices, values = k_per_token(product, k, group)
        torch.testing.assert_close(values, (x @ own.T)[indices.tokens, indices.latents], rtol=1e-5, atol=1e-5)
        return marked(indices, (200, len(own))), latents

    chosen = torch.zeros_like(pre_acts, dtype=torch.bool)
    for mask, latents in on_all(len(shares), choose):
        chosen[:, latents.own] = mask
    assert len(looked) == n_looks
    assert (chosen.sum(dim=1) == k).all()
    largest = pre_acts[chosen].view(200, k).sort(dim=1).values
    torch.testing.assert_close(largest, pre_acts.topk(k, dim=1).values.sort(dim=1).values, rtol=1e-5, atol=1e-5)

"""Checks a top-k search that starts from a rounded matmul against the top k of the exact matmul."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trainer.contract.planning import first_look
from trainer.contract.planning.first_look import Costs
from trainer.saes.kernels import reused_buffer, rounded_top_k, top_k
from trainer.saes.kernels.pre_acts import Product
from trainer.saes.kernels.rounded_top_k import Factors, largest_of_all, largest_of_each


def factors(n_tokens: int, d_in: int, d_sae: int, seed: int, spread: float) -> Factors:
    """Draw tokens and latents with norms that vary with `spread`, in an SAE's memory layout."""
    generator = torch.Generator().manual_seed(seed)

    def rows(n: int) -> Tensor:
        norms = (spread * torch.randn(n, 1, generator=generator)).exp()
        return torch.randn(n, d_in, generator=generator) * norms

    return Factors(rows(n_tokens), rows(d_sae).T, torch.randn(d_sae, generator=generator))


cases = st.builds(
    factors,
    st.integers(1, 60),
    st.sampled_from([1, 3, 48]),
    st.sampled_from([64, 100, 512]),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.3, 3.0]),
)


def assert_same(found: Tensor, expected: Tensor, product: Tensor) -> None:
    """Check equality, except for the last bits of fp32 sums, which depend on the summation order."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(product.abs().max()))


@settings(max_examples=100)
@given(cases, st.integers(1, 16))
def test_the_largest_values_for_each_token_match_the_exact_matmul(case: Factors, k: int) -> None:
    product = torch.addmm(case.b_enc, case.x, case.W_enc)
    columns, values = largest_of_each(case, k)
    assert all(len(set(row)) == k for row in columns.tolist())
    assert_same(values, product.gather(1, columns), product)
    assert_same(values.sort(dim=1, descending=True).values, product.topk(k, dim=1).values, product)


@settings(max_examples=100)
@given(cases, st.integers(1, 32))
def test_the_exact_values_lie_within_the_bounds_from_the_first_pass(case: Factors, n: int) -> None:
    x, W_enc, b_enc = (tensor.double() for tensor in case)
    exact = torch.addmm(b_enc, x, W_enc)
    looked = rounded_top_k.look(case, n)
    seen = exact.gather(1, looked.columns)
    assert (looked.lower <= seen).all()
    assert (seen <= looked.upper).all()
    others = exact.scatter(1, looked.columns, -torch.inf)
    assert (others.amax(dim=1) <= looked.ceiling).all()


def test_only_values_that_may_be_among_the_largest_are_computed_exactly() -> None:
    case = factors(500, 384, 3072, 0, 0.1)
    looked = rounded_top_k.look(case, 64)
    exact = torch.addmm(case.b_enc, case.x, case.W_enc)
    kth = exact.topk(32, dim=1).values[:, -1]
    values = looked.exact(kth).values
    is_left_out = values == -torch.inf
    assert (exact.gather(1, looked.columns)[is_left_out] < kth.repeat_interleave(is_left_out.sum(dim=1))).all()
    assert_same(values[~is_left_out], exact.gather(1, looked.columns)[~is_left_out], exact)
    assert 0.5 < (~is_left_out).sum() / values.numel() < 0.9


@settings(max_examples=100)
@given(cases, st.floats(0.05, 3.0))
def test_the_largest_values_in_a_batch_match_the_exact_matmul(case: Factors, k: float) -> None:
    product = torch.addmm(case.b_enc, case.x, case.W_enc).flatten()
    n = max(1, round(k * len(case.x)))
    if top := largest_of_all(case, n):
        flat, values = top
        assert (flat.diff() > 0).all()
        assert_same(values, product[flat], product)
        assert_same(values.sort(descending=True).values, product.topk(n).values, product)


def test_the_largest_values_are_usually_found_without_the_exact_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    made, addmm = [], torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda b, x, W, **out: made.append((x.dtype, len(x))) or addmm(b, x, W, **out))
    case = factors(500, 384, 3072, 0, 0.1)
    largest_of_each(case, 32)
    assert made[0] == (torch.bfloat16, 500)
    assert sum(n for _, n in made[1:]) < 50
    assert largest_of_all(case, 32 * 500) is not None


def test_tokens_with_few_positive_values_need_no_exact_matmul(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, k = factors(300, 384, 3072, 2, 0.0), 50
    case.b_enc.fill_(-1.845 * 384**0.5)
    exact = torch.addmm(case.b_enc, case.x, case.W_enc)
    n_positive = (exact > 0).sum(dim=1)
    assert n_positive.min() > k
    assert n_positive.min() < first_look.n_seen(k, 1)
    monkeypatch.setattr(Factors, "product", None)
    monkeypatch.setattr(Factors, "product_of", None)
    columns, values = largest_of_each(case, k)
    assert_same(values, exact.gather(1, columns), exact)
    assert_same(values.sort(dim=1, descending=True).values, exact.topk(k, dim=1).values, exact)


def test_the_first_pass_buffer_is_reused() -> None:
    case = factors(50, 16, 512, 0, 3.0)
    largest_of_each(case, 4)
    before = reused_buffer._kept.matrix
    assert before is not None
    assert before.dtype == torch.bfloat16
    largest_of_each(case, 4)
    assert reused_buffer._kept.matrix is before


@pytest.mark.parametrize("n_tokens", [0, 1])
def test_a_batch_may_be_empty(n_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "costs", lambda: Costs(0.2, 10))
    case = factors(n_tokens, 16, 512, 0, 0.1)
    assert Product(*case).largest(4)[1].shape == (n_tokens, 4)
    assert len(Product(*case).largest_of_all(4 * n_tokens)[1]) == 4 * n_tokens


def test_values_that_become_equal_after_rounding_are_ranked_exactly() -> None:
    # The latents differ by less than bf16 can represent.
    # All candidates are equal after rounding, so the exact matmul decides.
    x = torch.ones(3, 4)
    weights = 1 + torch.arange(200)[:, None].expand(200, 4) * 2.0**-15
    columns, _ = largest_of_each(Factors(x, weights.T, torch.zeros(200)), 5)
    assert all(sorted(row) == [195, 196, 197, 198, 199] for row in columns.tolist())
    case = Factors(x, weights.T, torch.zeros(200))
    top = largest_of_all(case, 15)
    assert top is None or sorted(top[0].tolist()) == [200 * token + 195 + i for token in range(3) for i in range(5)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_value_is_chosen_so_that_it_reaches_the_loss(bad: float) -> None:
    case = factors(30, 48, 512, 1, 0.1)
    case.x[7, 3] = bad
    _, values = largest_of_each(case, 4)
    assert not values[7].isfinite().all()
    assert values[[*range(7), *range(8, 30)]].isfinite().all()
    top = largest_of_all(case, 120)
    assert top is None or not top[1].isfinite().all()


def test_a_first_pass_is_used_only_for_fp32_on_a_cpu_with_fast_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_look, "costs", lambda: Costs(0.2, 10))
    case = factors(10, 48, 2048, 0, 0.1)
    assert rounded_top_k.pays(case, 256)
    assert not rounded_top_k.pays(case, 512)
    # For the top k over an entire batch, selecting from exact values is as fast as a rounded first pass.
    assert rounded_top_k.pays(case, 128, of_batch=True)
    assert not rounded_top_k.pays(case, 256, of_batch=True)
    assert not rounded_top_k.pays(Factors(*(tensor.double() for tensor in case)), 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert not rounded_top_k.pays(case, 64)
    monkeypatch.setattr(first_look, "costs", lambda: None)
    assert not rounded_top_k.pays(case, 64)


@pytest.mark.parametrize("threads", [1, 3])
def test_the_top_k_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    values, before = torch.randn(101, 97), torch.get_num_threads()
    expected = top_k.of_each(values, 5)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(top_k.of_each(values, 5), expected)
    finally:
        torch.set_num_threads(before)

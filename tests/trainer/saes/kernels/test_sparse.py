"""Checks sparse matmuls against dense matmuls, and their gradients against finite differences, in float64."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from trainer.parallel.threads import Threads, on_all
from trainer.saes.kernels import sparse
from trainer.saes.kernels.sparse import decode, dots, row_products, transposed_product
from trainer.saes.sparse_acts import DenseActs, SparseActs, SparseIndices

N_TOKENS, D_SAE, D = 5, 9, 4
# Tokens have zero, one or several entries.
# Latent 2 is active on all tokens with entries, and three latents are never active.
# One entry is repeated.
COUNTS = [3, 0, 1, 6, 2]
LATENTS = [2, 7, 2, 2, 0, 2, 3, 4, 8, 7, 2, 8]


def some_indices(latents: list[int] | None = None) -> SparseIndices:
    counts = torch.tensor(COUNTS)
    tokens = torch.arange(N_TOKENS).repeat_interleave(counts)
    return SparseIndices(torch.tensor(latents or LATENTS), tokens, counts.cumsum(0) - counts)


def no_indices() -> SparseIndices:
    nothing = torch.zeros(0, dtype=torch.int64)
    return SparseIndices(nothing, nothing, torch.zeros(N_TOKENS, dtype=torch.int64))


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def matrix(values: Tensor, indices: SparseIndices) -> Tensor:
    whole = values.new_zeros(N_TOKENS, D_SAE)
    return whole.index_put((indices.tokens, indices.latents), values, accumulate=True)


@pytest.mark.parametrize("indices", [some_indices(), no_indices()], ids=["some", "none"])
def test_sparse_matmuls_equal_dense_matmuls(indices: SparseIndices) -> None:
    values, rows, dense = random(len(indices.latents)), random(D_SAE, D), random(N_TOKENS, D)
    acts, whole = SparseActs(values, indices, D_SAE), matrix(values, indices)
    torch.testing.assert_close(decode(acts, rows), whole @ rows)
    torch.testing.assert_close(transposed_product(acts, dense), whole.T @ dense)
    expected = (dense @ rows.T)[indices.tokens, indices.latents]
    torch.testing.assert_close(row_products(dense, rows, indices), expected)


@pytest.mark.parametrize("n", [0, 1, 9])
def test_dot_products_of_corresponding_rows_are_correct_in_any_memory_layout(n: int) -> None:
    rows, others = random(n, 6), random(6, n).T
    expected = torch.stack([*(one @ other for one, other in zip(rows, others, strict=True)), rows.new_zeros(())])[:-1]
    torch.testing.assert_close(dots(rows, others), expected)


@pytest.fixture(params=[False, True], ids=["by token", "by latent"])
def reads_by_latent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """In one of the two cases, set the cache size to 0 so that rows do not fit in the cache."""
    if request.param:
        monkeypatch.setattr(sparse, "CACHE_BYTES", 0)
    return bool(request.param)


def test_rows_larger_than_the_cache_are_read_once_per_latent(
    reads_by_latent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, plain = [], sparse._row_products
    monkeypatch.setattr(sparse, "_row_products", lambda *given: read.append(given[2]) or plain(*given))
    rows, dense = random(D_SAE, D), random(N_TOKENS, D)
    products = row_products(dense, rows, some_indices())
    expected = (dense @ rows.T)[some_indices().tokens, some_indices().latents]
    torch.testing.assert_close(products, expected)
    by_latent = some_indices().tokens_by_latent(D_SAE)
    assert torch.equal(*read, by_latent if reads_by_latent else some_indices().latents)


@pytest.mark.usefixtures("reads_by_latent")
def test_decoding_gradients_match_finite_differences() -> None:
    values = random(len(LATENTS)).requires_grad_()
    rows = random(D_SAE, D).requires_grad_()
    assert torch.autograd.gradcheck(lambda v, w: decode(SparseActs(v, some_indices(), D_SAE), w), (values, rows))
    assert torch.autograd.gradcheck(
        lambda v, w: decode(DenseActs(v), w), (matrix(values, some_indices()).detach().requires_grad_(), rows)
    )


@pytest.mark.parametrize(("wanted", "unwanted"), [("values", "transposed_product"), ("rows", "row_products")])
def test_a_gradient_that_is_not_required_is_not_computed(
    wanted: str, unwanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {"values": random(len(LATENTS)), "rows": random(D_SAE, D)}
    tensors[wanted].requires_grad_()
    monkeypatch.setattr(f"trainer.saes.kernels.sparse.{unwanted}", None)
    decode(SparseActs(tensors["values"], some_indices(), D_SAE), tensors["rows"]).sum().backward()
    assert tensors[wanted].grad is not None


@pytest.mark.usefixtures("reads_by_latent")
def test_expanded_gradients_and_transposed_weights_are_read_correctly() -> None:
    values = random(len(LATENTS)).requires_grad_()
    rows = random(D, D_SAE).T.requires_grad_()
    indices = some_indices()
    grads = torch.autograd.grad(decode(SparseActs(values, indices, D_SAE), rows).sum(), (values, rows))
    expected = torch.autograd.grad((matrix(values, indices) @ rows).sum(), (values, rows))
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("d_sae", [9, 2**15 + 1, 2**16, 2**16 + 1, 2**17])
def test_entries_are_sorted_by_latent_and_then_by_token_at_any_width(d_sae: int) -> None:
    latents = [min(latent * 2**14, d_sae - 1) for latent in LATENTS] if d_sae > 9 else LATENTS
    indices = some_indices(latents)
    order, starts = indices.by_latent(d_sae)
    expected = sorted(range(len(latents)), key=lambda entry: (latents[entry], entry))
    assert order.tolist() == expected
    assert len(starts) == d_sae
    ends = [*starts.tolist()[1:], len(latents)]
    for latent in {0, *latents, d_sae - 1}:
        entries = expected[starts[latent] : ends[latent]]
        assert entries == [entry for entry in range(len(latents)) if latents[entry] == latent]


def test_entries_are_sorted_once_and_keep_their_order_when_regrouped() -> None:
    indices = some_indices()
    order = indices.by_latent(D_SAE)
    assert indices.by_latent(D_SAE) is order
    regrouped = indices.regroup(indices.tokens // 2, 3)
    assert regrouped.by_latent(D_SAE) is order
    values, dense = random(len(LATENTS)), random(3, D)
    expected = values.new_zeros(3, D_SAE).index_put((regrouped.tokens, regrouped.latents), values, accumulate=True)
    acts = SparseActs(values, regrouped, D_SAE)
    torch.testing.assert_close(transposed_product(acts, dense), expected.T @ dense)


class Noting(Threads):
    """A process group that records the dtype of the rows it gathers."""

    types: tuple[torch.dtype, ...] = ()

    def spread_parts_(self, tensors: Iterable[Tensor]) -> None:
        listed = list(tensors)
        self.types += tuple(tensor.dtype for tensor in listed)
        super().spread_parts_(listed)


@pytest.mark.parametrize("learns", [True, False])
def test_all_ranks_gather_a_gradient_in_the_same_dtype(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Pretend that the kernels are available.
    monkeypatch.setattr(sparse, "_dtype_of_rows", sparse.product_dtype)

    def types_of(thread: Threads) -> tuple[torch.dtype, ...]:
        group = Noting(thread._meeting, thread.size, thread.index)
        W_dec = torch.randn(3, 5, requires_grad=learns)
        latents = torch.tensor([0, 1, 2, 1])
        indices = SparseIndices(latents, torch.arange(4), torch.arange(4))
        values = torch.randn(4, requires_grad=True)
        acts = SparseActs(values, indices, 3)
        with torch.autocast("cpu", torch.bfloat16):
            decoded = decode(DenseActs(acts.dense()) if group.index else acts, W_dec, group)
        decoded.sum().backward()
        return group.types

    expected = torch.bfloat16 if learns else torch.float32
    assert on_all(2, types_of, 60.0) == [(expected,)] * 2

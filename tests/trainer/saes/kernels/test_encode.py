"""Checks the encoder against a dense matmul, and its gradients against finite differences in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from trainer.saes.kernels.encode import centre, encode
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import Chosen
from trainer.saes.sparse_acts import DenseActs, SparseActs, SparseIndices

N_TOKENS, D_IN, D_SAE = 6, 5, 8


def chosen(mask: Tensor, pre_acts: PreActs) -> Chosen:
    tokens, latents = mask.nonzero(as_tuple=True)
    indices = SparseIndices(latents, tokens, torch.searchsorted(tokens, torch.arange(len(mask))))
    return indices, pre_acts.matrix[tokens, latents]


def a_mask() -> Tensor:
    """Return a mask of about half of the entries: none for token 2 or latent 3, and nearly all for latent 5."""
    mask = torch.rand(N_TOKENS, D_SAE, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[:, 3], mask[:, 5], mask[2] = False, True, False
    return mask


def inputs(moves: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return x, W_enc, b_enc and an input bias that is trainable if `moves` is true."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N_TOKENS, D_IN, dtype=dtype, generator=generator)
    shapes = [(D_IN, D_SAE), (D_SAE,), (D_IN,)]
    W_enc, b_enc, bias = (torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes)
    return x, W_enc, b_enc, bias if moves else bias.detach()


def test_chosen_pre_activations_match_the_dense_matmul() -> None:
    x, W_enc, b_enc, bias = inputs()
    expected = (x - bias) @ W_enc + b_enc
    mask = a_mask()
    sparse = encode(centre(x, bias), W_enc, b_enc, bias, partial(chosen, mask))
    dense = encode(centre(x, bias), W_enc, b_enc, bias, lambda pre_acts: None)
    assert isinstance(sparse, SparseActs)
    assert isinstance(dense, DenseActs)
    torch.testing.assert_close(sparse.dense(), expected * mask)
    torch.testing.assert_close(dense.values, expected)


@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("mask", [a_mask(), torch.zeros(N_TOKENS, D_SAE, dtype=torch.bool), None])
def test_encoding_gradients_match_finite_differences(mask: Tensor | None, moves: bool) -> None:
    x, *weights = inputs(moves)
    choose = (lambda pre_acts: None) if mask is None else partial(chosen, mask)

    def values(W_enc: Tensor, b_enc: Tensor, bias: Tensor) -> Tensor:
        return encode(centre(x, bias), W_enc, b_enc, bias, choose).values

    assert torch.autograd.gradcheck(values, tuple(weights))


@pytest.mark.parametrize("is_sparse", [True, False])
def test_under_autocast_the_matmul_is_in_bf16_and_gradients_are_in_fp32(is_sparse: bool) -> None:
    x, *weights = inputs(dtype=torch.float32)
    W_enc, b_enc, b_dec = weights
    dtypes: list[torch.dtype] = []

    def choose(pre_acts: PreActs) -> Chosen | None:
        dtypes.append(pre_acts.matrix.dtype)
        return chosen(a_mask(), pre_acts) if is_sparse else None

    with torch.autocast("cpu", torch.bfloat16):
        acts = encode(centre(x, b_dec), W_enc, b_enc, b_dec, choose)
    assert dtypes == [torch.bfloat16]
    assert acts.values.dtype == torch.float32
    grads = torch.autograd.grad(acts.values.square().sum(), weights)
    exact = encode(centre(x, b_dec), W_enc, b_enc, b_dec, choose)
    for gradient, reference in zip(grads, torch.autograd.grad(exact.values.square().sum(), weights), strict=True):
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, reference, rtol=0, atol=0.02 * float(reference.abs().max()))


def test_later_batches_do_not_overwrite_earlier_results() -> None:
    # The buffer of pre-activations is reused, but never while it is still in use.
    # In `batches`, 1 stands for sparse and 0 for dense.
    x, W_enc, b_enc, bias = (tensor.detach() for tensor in inputs())
    batches = [(x, 1), (2 * x, 1), (3 * x, 0), (4 * x, 1), (5 * x[:2], 1), (6 * x, 0), (7 * x, 1), (8 * x.float(), 1)]

    def indices(pre_acts: PreActs) -> Chosen:
        return chosen(a_mask()[: pre_acts.shape[0]], pre_acts)

    results: list[Tensor] = []
    for batch, is_sparse in batches:
        # Two of the batches are encoded in inference mode, as during evaluation.
        with torch.inference_mode(len(results) in (0, 6)):
            choose = indices if is_sparse else lambda pre_acts: None
            weights = [tensor.to(batch.dtype) for tensor in (W_enc, b_enc, bias)]
            results.append(encode(centre(batch, weights[2]), *weights, choose).dense())
    for (batch, is_sparse), dense in zip(batches, results, strict=True):
        expected = (batch.double() - bias) @ W_enc + b_enc
        mask = a_mask()[: len(batch)] if is_sparse else 1
        # The last batch is in fp32, so the fp32 tolerance applies.
        torch.testing.assert_close(dense.double(), expected * mask, rtol=1e-5, atol=1e-5)

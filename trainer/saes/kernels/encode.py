"""An encoder that computes one dense matmul and keeps only the selected pre-activations.

For B tokens, a step with only dense matmuls takes 10·B·d_in·d_sae operations; a step with this encoder takes
2·B·d_in·d_sae. Autograd would scatter the gradient of the selected values into a dense [n_tokens, d_sae] matrix and
multiply by this matrix twice, and a third time for the gradient of x − input_bias.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.runtime.narrow_copy import kept_or_own
from trainer.runtime.phases import ENCODER, phase
from trainer.runtime.triton_kernels import ENCODER_INPUTS
from trainer.saes.kernels.pre_acts import PreActs, Product
from trainer.saes.kernels.select import Chosen
from trainer.saes.kernels.sparse import by_latent, product_dtype, weighted_sum
from trainer.saes.sparse_acts import Acts, DenseActs, SparseActs, SparseIndices

# A function that returns the positions and values of the pre-activations to keep, or None to keep the dense matrix. The
# function must not keep a reference to the matrix, because the next matmul overwrites it unless the result is None.
Choose = Callable[[PreActs], Chosen | None]


@torch.no_grad()
def centre(x: Tensor, input_bias: Tensor) -> Tensor:
    """Return x − input_bias for x [n_tokens, d_in] in the matmul dtype, without a gradient.

    Under autocast the matmul dtype is bf16 or fp16. A GPU kernel subtracts and converts in one pass.
    """
    dtype = product_dtype(x)
    if dtype.itemsize == 2 and (triton := ENCODER_INPUTS.on(x, dtype)) and triton.fits(x, input_bias):
        centred: Tensor = triton.centre(x, input_bias, dtype)
        return centred
    return torch.sub(x, input_bias, out=x.new_empty(x.shape, dtype=dtype))


def encode(centred: Tensor, W_enc: Tensor, b_enc: Tensor, input_bias: Tensor, choose: Choose) -> Acts:
    """Return the pre-activations of centred @ W_enc + b_enc [n_tokens, d_sae] selected by `choose`, in b_enc's dtype.

    `centred` is x − input_bias [n_tokens, d_in], from `centre`. This function's backward pass also computes the
    gradient of `input_bias`.
    """
    with phase(ENCODER):
        values, indices = _Encode.apply(centred, W_enc, b_enc, input_bias, choose)  # type: ignore[no-untyped-call]
    return DenseActs(values) if indices is None else SparseActs(values, indices, W_enc.shape[1])


class _Encode(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, centred: Tensor, W_enc: Tensor, b_enc: Tensor, input_bias: Tensor, choose: Choose
    ) -> tuple[Tensor, SparseIndices | None]:
        pre_acts = Product(centred, kept_or_own(W_enc, centred.dtype), b_enc)
        chosen = choose(pre_acts)
        ctx.save_for_backward(centred, W_enc)
        if chosen is None:
            ctx.indices = None
            return pre_acts.matrix.to(b_enc.dtype), None
        ctx.indices, values = chosen
        pre_acts.let_go()
        return values.to(b_enc.dtype), ctx.indices

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: None) -> tuple[Tensor | None, ...]:
        centred, W_enc = ctx.saved_tensors
        if ctx.indices is None:
            # Compute the gradient in the memory layout of W_enc; otherwise it would be copied into that layout.
            grad_W_enc = (grad.to(centred.dtype).T @ centred).T
            grad_b_enc = grad.sum(dim=0)
        else:
            acts = SparseActs(grad, ctx.indices, W_enc.shape[1])
            of_latents, grad_b_enc = by_latent(acts, centred, W_enc)
            grad_W_enc = of_latents.T
        grad_input_bias = None
        if ctx.needs_input_grad[3]:
            # Sum over tokens first: a matrix–vector product then suffices, and the gradient of x is not needed.
            grad_input_bias = weighted_sum(grad_b_enc, kept_or_own(W_enc, centred.dtype).T, -1.0)
        return None, grad_W_enc.to(W_enc.dtype), grad_b_enc, grad_input_bias, None

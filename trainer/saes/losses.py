"""Loss terms, each summed over tokens. Means are computed only after the terms have been summed over all ranks."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.runtime.triton_kernels import RECONSTRUCTION_ERRORS, SPARSE_PRODUCTS
from trainer.saes.kernels.sparse import Decoded, DecoderGradients


class Moments(NamedTuple):
    """The sums over tokens of ‖v‖², 0-dim, and of v, [d]."""

    square: Tensor
    total: Tensor


class Sums(NamedTuple):
    """Moments of the errors x_hat − y and, if GPU kernels compute them in the same pass, of the targets y − y_mean."""

    error: Moments
    centred: Moments | None = None


class Errors(NamedTuple):
    """The errors of x_hat [n_tokens, d_out] relative to its targets y.

    `square`, 0-dim and differentiable with respect to x_hat, is Σ‖x_hat − y‖² over the tokens. `each`, x_hat − y
    [n_tokens, d_out], and `sums`, its sums over the tokens, have no gradient.
    """

    square: Tensor
    each: Tensor
    sums: Sums


def errors_of(y: Tensor, x_hat: Tensor, y_mean: Tensor) -> Errors:
    """Return the errors of x_hat [n_tokens, d_out]; `y_mean` [d_out] is the approximate mean of the targets."""
    triton = triton_for(y, x_hat)
    if triton is None:
        square, each = _sum(x_hat, y, -1)
        return Errors(square, each, Sums(Moments(square.detach(), each.sum(dim=0))))
    each, sums = triton.errors_of(y, x_hat.detach(), y_mean)
    return Errors(_Square.apply(x_hat, each, sums.error.square), each, sums)  # type: ignore[no-untyped-call]


def errors_of_decoded(
    y: Tensor, decoded: Decoded, offset: Tensor, y_mean: Tensor, triton: ModuleType
) -> tuple[Tensor, Errors]:
    """Return x_hat, without a gradient, and its errors; kernels decode x_hat and add `offset` [d_out]."""
    found = triton.errors_of_bags(decoded.acts, decoded.rows, offset.detach(), y, y_mean)
    error = found.sums.error
    (square,) = decoded.with_gradients(offset, _gradients, (found.narrow, error.total), (error.square,))
    return found.x_hat, Errors(square, found.errors, found.sums)


def _gradients(each: Tensor, total: Tensor, grad: Tensor, _: torch.dtype) -> DecoderGradients:
    twice = 2 * grad
    return DecoderGradients(each, total * twice, twice)


def squared_error(y: Tensor, x_hat: Tensor) -> Tensor:
    """Return Σ‖y − x_hat‖² over the tokens of y [n_tokens, d_out], 0-dim; only x_hat gets a gradient."""
    return _sum(x_hat, y, -1)[0]


def auxk_error(error: Tensor, explained: Tensor, weight: Tensor) -> Tensor:
    """Return the error that the dead latents leave unexplained: `weight` · Σ‖error + explained‖² over tokens.

    `error` is x_hat − y from the live latents, and `explained` is the dead latents' reconstruction of y − x_hat. The
    weight is 1 / (variance of y − x_hat), as in Gao et al. 2024, arXiv 2406.04093, appendix A.2. `error` is a target
    and gets no gradient; otherwise, the live latents would learn to make errors that are easy for dead latents to
    reconstruct.
    """
    # Check that the sparse kernels work in this dtype: a GPU may not support bf16, and the error kernels' self-test
    # does not detect that. A dtype that works for products also works for sums.
    is_narrow = explained.dtype != error.dtype and SPARSE_PRODUCTS.on(explained)
    triton = triton_for(error) if is_narrow else None
    if triton is None:
        return _sum(explained, error, 1)[0] * weight
    square, twice = triton.add_and_square(explained.detach(), error, weight)
    return _Weighted.apply(explained, twice, square, weight)  # type: ignore[no-untyped-call,no-any-return]


def _sum(x: Tensor, y: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Return Σ‖x + sign · y‖², differentiable with respect to x, and x + sign · y itself."""
    each = torch.add(x.detach(), y.detach(), alpha=sign)
    return _Square.apply(x, each, sum_of_squares(each)), each  # type: ignore[no-untyped-call]


class _Square(torch.autograd.Function):
    """A precomputed Σ‖error‖², differentiable with respect to x; `error` is x plus a constant.

    The gradient takes one pass over the errors; autograd would take three for (x − y)².
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Tensor, square: Tensor) -> Tensor:
        ctx.save_for_backward(error)
        ctx.dtype = x.dtype
        return square.view_as(square)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (error,) = ctx.saved_tensors
        # If x is 16-bit, this pass also converts the gradient. With 16-bit errors, a GPU would round a 0-dim factor to
        # their dtype, changing the entire gradient by up to 1 part in 256. A factor of shape [1] is not rounded.
        twice = (2 * grad).reshape(1)
        return torch.mul(error, twice, out=torch.empty_like(error, dtype=ctx.dtype)), None, None


class _Weighted(torch.autograd.Function):
    """A precomputed weight · Σ‖error‖², differentiable with respect to x; the gradient uses `twice` = 2 · error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, twice: Tensor, square: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(twice, weight)
        return square.view_as(square)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        twice, weight = ctx.saved_tensors
        # Reshape the factor to [1] so that it is not rounded, as in `_Square`.
        return torch.mul(twice, (grad * weight).reshape(1), out=torch.empty_like(twice)), None, None, None


def triton_for(y: Tensor, *others: Tensor) -> ModuleType | None:
    """Return the Triton kernels if they work on this GPU and support y and the other tensors, otherwise None."""
    triton = RECONSTRUCTION_ERRORS.on(y)
    return triton if triton and triton.fits(y, *others) else None


def sum_of_squares(values: Tensor) -> Tensor:
    """Return Σ values², 0-dim, without a temporary copy."""
    flat = values.flatten()
    return flat.dot(flat)

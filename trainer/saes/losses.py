"""Loss terms, each a sum over tokens: a mean is taken only after the sums of all ranks are added."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.runtime.triton_kernels import working_kernels
from trainer.saes.kernels import sparse
from trainer.saes.kernels.sparse import Decoded, Gradients


class Moments(NamedTuple):
    """Σ‖v‖², 0-dim, and Σv [d] over tokens."""

    square: Tensor
    total: Tensor


class Sums(NamedTuple):
    """Moments of the errors x_hat − y, and of the targets, y − y_mean, where a GPU takes them along."""

    error: Moments
    centred: Moments | None = None


class Errors(NamedTuple):
    """What x_hat [n_tokens, d_out] misses of its targets y.

    `square` is Σ‖x_hat − y‖² over the tokens, 0-dim, of which x_hat gets a gradient. Without one are `each`, x_hat − y
    itself [n_tokens, d_out], and what is summed of it over the tokens.
    """

    square: Tensor
    each: Tensor
    sums: Sums


def errors_of(y: Tensor, x_hat: Tensor, y_mean: Tensor) -> Errors:
    """Return the errors of x_hat [n_tokens, d_out], whose targets have about the mean `y_mean` [d_out]."""
    triton = triton_for(y, x_hat)
    if triton is None:
        square, each = _sum(x_hat, y, -1)
        return Errors(square, each, Sums(Moments(square.detach(), each.sum(dim=0))))
    each, sums = triton.errors_of(y, x_hat.detach(), y_mean)
    return Errors(_Square.apply(x_hat, each, sums.error.square), each, sums)  # type: ignore[no-untyped-call]


def errors_of_decoded(
    y: Tensor, decoded: Decoded, offset: Tensor, y_mean: Tensor, triton: ModuleType
) -> tuple[Tensor, Errors]:
    """Return x_hat, which has no gradient, and its errors: what is `decoded` by kernels, and the `offset` [d_out]."""
    found = triton.errors_of_bags(decoded.acts, decoded.rows, offset.detach(), y, y_mean)
    error = found.sums.error
    (square,) = decoded.with_gradients(offset, _gradients, (found.narrow, error.total), (error.square,))
    return found.x_hat, Errors(square, found.errors, found.sums)


def _gradients(each: Tensor, total: Tensor, grad: Tensor, _: torch.dtype) -> Gradients:
    twice = 2 * grad
    return Gradients(each, total * twice, twice)


def squared_error(y: Tensor, x_hat: Tensor) -> Tensor:
    """Return Σ‖y − x_hat‖² over the tokens of [n_tokens, d_in], a scalar; only x_hat gets a gradient."""
    return _sum(x_hat, y, -1)[0]


def auxk_error(error: Tensor, explained: Tensor, weight: Tensor) -> Tensor:
    """Return what dead latents leave unexplained of y − x_hat, Σ‖error + explained‖² over tokens, times a `weight`.

    Given are what the living ones miss, `error` = x_hat − y, and what of y − x_hat is `explained`. The weight is 1 by
    the variance of y − x_hat: Gao et al. 2024, arXiv 2406.04093, appendix A.2. The error is a target, not a prediction:
    with a gradient the living latents would be pulled towards errors that are easy for dead ones.
    """
    # In a type in which products work, sums do too: a card may know no bf16, which the trial of errors does not show.
    is_narrow = explained.dtype != error.dtype and sparse.triton_for(explained)
    triton = triton_for(error) if is_narrow else None
    if triton is None:
        return _sum(explained, error, 1)[0] * weight
    square, twice = triton.add_and_square(explained.detach(), error, weight)
    return _Weighted.apply(explained, twice, square, weight)  # type: ignore[no-untyped-call,no-any-return]


def _sum(x: Tensor, y: Tensor, sign: int) -> tuple[Tensor, Tensor]:
    """Return Σ‖x + sign · y‖², of which x gets a gradient, and x + sign · y itself."""
    each = torch.add(x.detach(), y.detach(), alpha=sign)
    return _Square.apply(x, each, sum_of_squares(each)), each  # type: ignore[no-untyped-call]


class _Square(torch.autograd.Function):
    """Σ‖error‖², which is known already, with the gradient of x whose error it is.

    That takes one pass over the errors, where autograd of (x − y)² makes three.
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
        # Where x has 16 bits it is narrowed in the same pass, unless it was before. A GPU would round a single number
        # to the type of narrow errors, and all of the gradient be off by up to 1 in 256; a vector of one it does not.
        twice = (2 * grad).reshape(1)
        return torch.mul(error, twice, out=torch.empty_like(error, dtype=ctx.dtype)), None, None


class _Weighted(torch.autograd.Function):
    """weight · Σ‖error‖², which is known already, as is 2 · error in the type of x, whose error it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, twice: Tensor, square: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(twice, weight)
        return square.view_as(square)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        twice, weight = ctx.saved_tensors
        # A vector of one, as in `_Square`.
        return torch.mul(twice, (grad * weight).reshape(1), out=torch.empty_like(twice)), None, None, None


def triton_for(y: Tensor, *others: Tensor) -> ModuleType | None:
    """Return the Triton kernels where they work, on a GPU, for targets y and what is of their kind; else None."""
    triton = _working_triton(y.device) if y.is_cuda else None
    return triton if triton and triton.fits(y, *others) else None


def sum_of_squares(values: Tensor) -> Tensor:
    """Return Σ values², 0-dim, without a copy of them."""
    flat = values.flatten()
    return flat.dot(flat)


def _working_triton(device: torch.device) -> ModuleType | None:
    return working_kernels("trainer.saes.kernels.triton_errors", device)

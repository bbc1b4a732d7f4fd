"""Loss terms, each a sum over tokens: a mean is taken only after the sums of all ranks are added."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def squared_error(y: Tensor, x_hat: Tensor) -> Tensor:
    """Return Σ‖y − x_hat‖² over the tokens of [n_tokens, d_in], a scalar; only x_hat gets a gradient."""
    error: Tensor = _SquaredError.apply(y, x_hat)  # type: ignore[no-untyped-call]
    return error


def auxk_error(residual: Tensor, aux_x_hat: Tensor, residual_variance: Tensor) -> Tensor:
    """Return the share of the residual's variance that dead latents leave unexplained, summed over tokens.

    Gao et al. 2024, arXiv 2406.04093, appendix A.2. The residual is a target, not a prediction: with a gradient the
    living latents would be pulled towards errors that are easy for dead ones.
    """
    return squared_error(residual, aux_x_hat) / residual_variance


class _SquaredError(torch.autograd.Function):
    """Σ‖y − x_hat‖², with its gradient in one pass over the errors, where autograd of (y − x_hat)² makes three."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x_hat: Tensor) -> Tensor:
        error = x_hat - y
        ctx.save_for_backward(error)
        return sum_of_squares(error)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (error,) = ctx.saved_tensors
        return None, error * (2 * grad)


def sum_of_squares(values: Tensor) -> Tensor:
    """Return Σ values², 0-dim, without a copy of them."""
    flat = values.flatten()
    return flat.dot(flat)

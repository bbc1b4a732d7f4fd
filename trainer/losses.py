"""Loss terms, each a sum over tokens: a mean is taken only after the sums of all ranks are added."""

from __future__ import annotations

from torch import Tensor


def squared_error(x: Tensor, x_hat: Tensor) -> Tensor:
    """Σ‖x − x_hat‖² over the tokens of [n_tokens, d_in], a scalar."""
    return (x - x_hat).square().sum()


def auxk_error(residual: Tensor, aux_x_hat: Tensor, residual_variance: Tensor) -> Tensor:
    """Share of the residual's variance that dead latents leave unexplained, summed over tokens.

    Gao et al. 2024, arXiv 2406.04093, appendix A.2. The residual is a target, not a prediction:
    without `detach` the living latents would be pulled towards errors that are easy for dead ones.
    """
    return squared_error(residual.detach(), aux_x_hat) / residual_variance

"""The weights an SAE starts from."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.contract.config import Sae as SaeSettings
from trainer.saes.base import Sae


@torch.no_grad()
def initialise(sae: Sae, sample: Tensor, settings: SaeSettings, seed: int) -> None:
    """Random unit decoder rows, the encoder tied to them, b_dec from rows of the data [n_tokens, d_in]."""
    generator = torch.Generator().manual_seed(seed)
    sae.W_dec.copy_(torch.randn(sae.d_sae, sae.d_in, generator=generator))
    sae.normalise_decoder()
    sae.W_enc.copy_(settings.encoder_scale * sae.W_dec.T)
    sae.x_mean.copy_(sample.mean(dim=0))
    # Constant data has no variance to explain; the floor keeps its loss finite.
    sae.x_variance.copy_((sample - sae.x_mean).square().sum(dim=1).mean().clamp_min(1e-12))
    if settings.b_dec_init == "mean":
        sae.b_dec.copy_(sae.x_mean)
    elif settings.b_dec_init == "geometric_median":
        sae.b_dec.copy_(geometric_median(sample))


def geometric_median(points: Tensor, max_iterations: int = 100, tolerance: float = 1e-5) -> Tensor:
    """The point [d_in] with the smallest mean distance to `points` [n, d_in], by Weiszfeld's iteration.

    Unlike the mean it is not drawn away by the few tokens with norms far above all others.
    """
    median = points.mean(dim=0)
    for _ in range(max_iterations):
        weights = 1 / (points - median).norm(dim=1).clamp_min(1e-12)
        moved = weights @ points / weights.sum()
        step, median = (moved - median).norm(), moved
        if step <= tolerance * median.norm():
            break
    return median

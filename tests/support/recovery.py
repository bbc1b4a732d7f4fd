"""Measures how well an SAE has recovered the features of a known dictionary."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

# The number of cosines in memory at a time. 65,536 features and 65,536 latents have 4 billion cosines.
_AT_A_TIME = 2**24


@torch.no_grad()
def mmcs(W_dec: Tensor, features: Tensor) -> float:
    """Compute the mean max cosine similarity (Sharkey et al. 2022, "Taking features out of superposition").

    Each true feature, a row of `features` [n_features, d], is compared with the most similar row of `W_dec` [d_sae, d].
    The result is 1 if every feature is a latent, even if there are additional latents.
    """
    latents, features = normalize(W_dec, dim=1), normalize(features.to(W_dec), dim=1)
    parts = features.split(max(1, _AT_A_TIME // len(latents)))
    return float(torch.cat([(part @ latents.T).amax(dim=1) for part in parts]).mean())

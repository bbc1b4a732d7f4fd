"""How well a known dictionary was recovered."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

# Cosines held at a time; a dictionary of 65,536 features has 4 billion of them with as many latents.
_AT_A_TIME = 2**24


@torch.no_grad()
def mmcs(W_dec: Tensor, features: Tensor) -> float:
    """Compute the mean max cosine similarity (Sharkey et al. 2022, "Taking features out of superposition").

    Each true feature, a row of `features` [n_features, d], is compared with the row of `W_dec` [d_sae, d] most like it:
    1 where every feature is a latent, whatever else there is.
    """
    latents, features = normalize(W_dec, dim=1), normalize(features.to(W_dec), dim=1)
    parts = features.split(max(1, _AT_A_TIME // len(latents)))
    return float(torch.cat([(part @ latents.T).amax(dim=1) for part in parts]).mean())

"""Finds the tokens that the latents of an SAE promote and suppress, from their decoder directions (the logit lens).

nostalgebraist 2020, "interpreting GPT: the logit lens"; applied to decoder directions as in SAEDashboard and
Neuronpedia: W_dec @ W_U. Here W_U includes the weight of the model's final norm, as with TransformerLens' `fold_ln`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens to keep of each kind, promoted and suppressed.
N_TOKENS = 10
# The most logits to hold in memory at once, in fp32.
_AT_ONCE = 2**25


@torch.inference_mode()
def moved_tokens(w_dec: Tensor, w_u: Tensor) -> dict[str, Tensor]:
    """Return the tokens that each direction promotes and suppresses most, and their logits, [d_sae, n] each.

    `trainer.contract.runs.features` reads these names. `w_dec` [d_sae, d_model] has the directions, and
    `w_u` [d_model, n_ids] maps them to logits.
    """
    n, at_once = min(N_TOKENS, w_u.shape[1]), max(1, _AT_ONCE // w_u.shape[1])
    up, down = [], []
    for directions in w_dec.to(w_u).split(at_once):
        logits = directions @ w_u
        up.append(logits.topk(n, dim=1))
        down.append(logits.topk(n, dim=1, largest=False))
    tensors = {}
    for name, parts in (("promoted", up), ("suppressed", down)):
        tensors[name] = torch.cat([one.indices for one in parts]).int().cpu()
        tensors[f"{name}_logits"] = torch.cat([one.values for one in parts]).cpu()
    return tensors

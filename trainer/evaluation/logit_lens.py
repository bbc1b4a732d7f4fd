"""Which tokens the latents of an SAE promote and suppress, as read off their decoder directions (the logit lens).

nostalgebraist 2020, "interpreting GPT: the logit lens"; of decoder directions as SAEDashboard and Neuronpedia show it:
W_dec @ W_U. Here W_U has the weight of the model's final norm folded into it, as TransformerLens' `fold_ln` does.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Tokens at either end.
N_TOKENS = 10
# Logits that are held at once, in fp32.
_AT_ONCE = 2**25


@torch.inference_mode()
def moved_tokens(w_dec: Tensor, w_u: Tensor) -> dict[str, Tensor]:
    """Return what `trainer.contract.runs.features` reads of the tokens that directions move most, [d_sae, n] each.

    `w_dec` [d_sae, d_model] are the directions, `w_u` [d_model, n_ids] what makes logits of them.
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

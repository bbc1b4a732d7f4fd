"""Resamples dead latents (Bricken et al. 2023, "Towards Monosemanticity", appendix "Neuron Resampling")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.parallel.group import all_gather, local_shard
from trainer.saes.base import Sae

# The number of rows evaluated in one pass.
CHUNK = 4096


@torch.no_grad()
def resample(sae: Sae, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """Set dead latents to the directions of badly reconstructed tokens; return a mask of these latents, bool [d_sae].

    The tokens are sampled from normalised x [n_tokens, d_in] and y [n_tokens, d_out], with probability proportional to
    the square of their loss. A latent's encoder and decoder directions then become the direction from the centre to its
    token; the encoder direction is scaled by `Traits.revived_share`. The biases are scaled too; the paper does not need
    this, because its biases start at 0.
    """
    dead = sae.dead()
    all_dead = sae.latents.whole(dead)
    n_dead = int(all_dead.sum())
    if n_dead in (0, sae.d_sae):
        return torch.zeros_like(dead)
    weights = _losses(sae, x, y).double().square().clamp_min(1e-30).cpu()
    drawn = torch.multinomial(weights / weights.sum(), n_dead, replacement=n_dead > len(x), generator=generator)
    # The tokens are sampled for the dead latents on all ranks, in order. Select the tokens for this rank's latents.
    drawn = drawn.to(x.device)[(all_dead.cumsum(0) - 1)[sae.ids[dead]]]
    reads = F.normalize(x[drawn] - sae.input_bias, dim=1)
    writes = F.normalize(y[drawn] - sae.offset(x[drawn]), dim=1)
    sae.revive(dead, reads, writes)
    sae.n_tokens_since_fired.masked_fill_(dead, 0)
    return dead


def _losses(sae: Sae, x: Tensor, y: Tensor) -> Tensor:
    """Return ‖y − x_hat‖² for every token [n_tokens]."""
    was_training = sae.training
    sae.eval()
    parts = [_losses_of(sae, *rows) for rows in zip(x.split(CHUNK), y.split(CHUNK), strict=True)]
    sae.train(was_training)
    return torch.cat(parts)


def _losses_of(sae: Sae, x: Tensor, y: Tensor) -> Tensor:
    own = local_shard(y, sae.latents.group)
    return all_gather((own - sae(x, own).x_hat).square().sum(dim=1), len(y), sae.latents.group)

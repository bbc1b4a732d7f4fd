"""AuxK: latents that have died learn to explain what the others leave over (Gao et al. 2024, arXiv 2406.04093)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.parallel.group import Group, part_summed
from trainer.saes.base import Sae
from trainer.saes.kernels import top_k
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.top_k_across_ranks import among_largest
from trainer.saes.losses import auxk_error


class AuxK(nn.Module):
    """The auxiliary loss of one SAE, weighted by `alpha`; k_aux defaults to half of d_in."""

    residual_variance: Tensor

    def __init__(self, d_in: int, d_sae: int, k_aux: int | None, alpha: float) -> None:
        super().__init__()
        self.k_aux = min(k_aux or max(1, d_in // 2), d_sae)
        self.alpha = alpha
        self.register_buffer("residual_variance", torch.ones(()))

    def loss(self, sae: Sae, x: Tensor, y: Tensor, x_hat: Tensor) -> Tensor:
        """Return the share of the residual's variance that dead latents leave unexplained, summed over tokens, 0-dim.

        It is 0 where no latent is dead, and outside training.
        """
        if not self.alpha or not sae.training or not sae.may_have_dead():
            return x.new_zeros(())
        explained, is_any_dead = self._explain_by_dead(sae, x)
        return auxk_error(y - x_hat, explained, self.residual_variance) * is_any_dead

    def learn_from(self, sums: Tensor) -> None:
        """Take in Σ‖y − x_hat‖² of this step, from which the next step's loss gets the residual's variance.

        A step's own sum would need an exchange between ranks before its backward pass. b_dec keeps the residual's mean
        near 0, so that its mean square is its variance.
        """
        n_tokens, error = sums[0], sums[1]
        variance = (error / n_tokens).clamp_min(1e-12)
        torch.where(n_tokens > 0, variance, self.residual_variance, out=self.residual_variance)

    def _explain_by_dead(self, sae: Sae, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return a reconstruction [n_tokens, d_out] from each token's k_aux strongest dead latents, and if any is dead.

        At most 2·k_aux latents, those silent for longest, are candidates: their dense products stay a small part of
        the step however many are dead, and a fixed number needs no answer from a GPU or from other ranks.
        """
        candidates, is_dead, is_any_dead, n_chosen = self._candidates(sae)
        dims = {"b_enc": 0, "W_enc": 1, "W_dec": 0}
        b_enc, W_enc, W_dec = (sae.row_gradients.rows(getattr(sae, name), candidates, dims[name]) for name in dims)
        fixed = sae.input_bias.detach()
        # Nothing is added, but this is where input_bias gets its gradient: a product with one vector, not with x's.
        b_enc = b_enc + W_enc.detach() @ (fixed - sae.input_bias)
        pre_acts = torch.addmm(b_enc.masked_fill(~is_dead, -torch.inf), x - fixed, W_enc.T)
        acts = pre_acts.relu() * _are_strongest(pre_acts.detach(), n_chosen, sae.latents.group)
        return part_summed(acts @ W_dec, sae.latents.group), is_any_dead

    def _candidates(self, sae: Sae) -> tuple[Tensor, Tensor, Tensor, int]:
        """Find the dead latents silent for longest, at most 2·k_aux on all ranks together.

        Return the indices [n] of this rank's longest silent latents, a bool [n] that marks those which are really among
        them, a 0-dim bool: whether any rank has one, and how many to choose for each token.
        """
        n, n_chosen = min(2 * self.k_aux, sae.d_sae), min(self.k_aux, sae.d_sae)
        # Many have been silent for equally long; the lower latent number comes first, whichever rank holds it.
        largest, candidates = _longest_silent(sae, min(n, sae.n_own))
        everybodys = sae.latents.group.gather(F.pad(largest, (0, n - len(largest)), value=-1)).flatten()
        nth = largest[-1] if sae.latents.group.size == 1 else everybodys.topk(n).values[-1]
        bound = nth.clamp_min(sae.dead_after_tokens * sae.d_sae)
        is_candidate, are_candidates = largest >= bound, everybodys >= bound
        if not is_candidate.is_cuda:
            # Counting the dead is free here; without it 2 dead latents of 3,072 would cost as much as a whole step.
            n_own = max(1, int(is_candidate.sum()))
            n_chosen = max(1, min(n_chosen, int(are_candidates.sum())))
            candidates, is_candidate = candidates[:n_own], is_candidate[:n_own]
        return candidates, is_candidate, are_candidates.any(), n_chosen


def _longest_silent(sae: Sae, n: int) -> tuple[Tensor, Tensor]:
    """Return of this rank's n latents that have been silent for longest a key to compare them by, and their indices."""
    silence = sae.n_tokens_since_fired
    keys = silence * sae.d_sae + (sae.d_sae - 1 - sae.ids)
    if not silence.is_cuda:
        largest, candidates = keys.topk(n)
        return largest, candidates
    # Equal numbers keep the order of latents. Sorting 32 bits takes 11 kernels where the top of 64 bits takes 33; who
    # was silent for 2 billion tokens is as dead as who was for longer.
    candidates = silence.clamp_max(2**31 - 1).int().sort(stable=True, descending=True).indices[:n]
    return keys.index_select(0, candidates), candidates


def _are_strongest(pre_acts: Tensor, k: int, group: Group) -> Tensor:
    """Mark each token's k largest over all ranks, of which these have the same tokens: bool [n_tokens, n]."""
    if group.size == 1:
        return top_k.mark_largest(pre_acts, k)
    columns, _, is_chosen = among_largest(PreActs(pre_acts), k, group)
    return torch.zeros_like(pre_acts, dtype=torch.bool).scatter(1, columns, is_chosen)

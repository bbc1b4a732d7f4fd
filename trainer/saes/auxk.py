"""AuxK: latents that have died learn to explain what the others leave over (Gao et al. 2024, arXiv 2406.04093)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

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

    def loss(self, sae: Sae, centred: Tensor, error: Tensor) -> Tensor:
        """Return the share of the error's variance that dead latents leave unexplained, summed over tokens, 0-dim.

        `centred` is what the encoder reads [n_tokens, d_in], `error` x_hat − y [n_tokens, d_out] of this rank's tokens.
        It is 0 where no latent is dead, and outside training.
        """
        if not self.alpha or not sae.training or not sae.may_have_dead():
            return error.new_zeros(())
        explained, is_any_dead = self._explain_by_dead(sae, centred)
        return auxk_error(error, explained, self.residual_variance) * is_any_dead

    def learn_from(self, sums: Tensor) -> None:
        """Take in Σ‖y − x_hat‖² of this step, from which the next step's loss gets the residual's variance.

        A step's own sum would need an exchange between ranks before its backward pass. b_dec keeps the residual's mean
        near 0, so that its mean square is its variance.
        """
        n_tokens, error = sums[0], sums[1]
        variance = (error / n_tokens).clamp_min(1e-12)
        torch.where(n_tokens > 0, variance, self.residual_variance, out=self.residual_variance)

    def _explain_by_dead(self, sae: Sae, centred: Tensor) -> tuple[Tensor, Tensor]:
        """Return a reconstruction [n_tokens, d_out] from each token's k_aux strongest dead latents, and if any is dead.

        At most 2·k_aux latents, those silent for longest, are candidates: their dense products stay a small part of
        the step however many are dead, and a fixed number needs no answer from a GPU or from other ranks.
        """
        candidates, is_dead, is_any_dead, n_chosen = self._candidates(sae)
        dims = {"b_enc": 0, "W_enc": 1, "W_dec": 0}
        rows = (sae.row_gradients.rows(getattr(sae, name), candidates, dims[name], centred.dtype) for name in dims)
        choose = partial(_strongest, k=n_chosen, group=sae.latents.group)
        explained: Tensor = _Explain.apply(centred, sae.input_bias, *rows, is_dead, choose)  # type: ignore[no-untyped-call]
        return part_summed(explained, sae.latents.group), is_any_dead

    def _candidates(self, sae: Sae) -> tuple[Tensor, Tensor, Tensor, int]:
        """Find the dead latents silent for longest, at most 2·k_aux on all ranks together.

        Return the indices [n] of this rank's longest silent latents, a bool [n] that marks those which are really among
        them, a 0-dim bool: whether any rank has one, and how many to choose for each token.
        """
        n, n_chosen = min(2 * self.k_aux, sae.d_sae), min(self.k_aux, sae.d_sae)
        # Many have been silent for equally long; the lower latent number comes first, whichever rank holds it.
        candidates = _longest_silent(sae, min(n, sae.n_own))
        if sae.latents.group.size == 1:
            is_candidate = are_candidates = (
                sae.n_tokens_since_fired.index_select(0, candidates) >= sae.dead_after_tokens
            )
        else:
            is_candidate, are_candidates = _among_longest_silent(sae, candidates, n)
        if not is_candidate.is_cuda:
            # Counting the dead is free here; without it 2 dead latents of 3,072 would cost as much as a whole step.
            n_own = max(1, int(is_candidate.sum()))
            n_chosen = max(1, min(n_chosen, int(are_candidates.sum())))
            candidates, is_candidate = candidates[:n_own], is_candidate[:n_own]
        # They are in order.
        is_any = are_candidates[0] if sae.latents.group.size == 1 else are_candidates.any()
        return candidates, is_candidate, is_any, n_chosen


def _longest_silent(sae: Sae, n: int) -> Tensor:
    """Return the indices of this rank's n latents that have been silent for longest, in order."""
    silence = sae.n_tokens_since_fired
    if not silence.is_cuda:
        return _keys(sae).topk(n).indices
    # Equal numbers keep the order of latents. Sorting 32 bits takes 11 kernels where the top of 64 bits takes 33; who
    # was silent for 2 billion tokens is as dead as who was for longer.
    return silence.clamp_max(2**31 - 1).int().sort(stable=True, descending=True).indices[:n]


def _among_longest_silent(sae: Sae, own: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Tell which of this rank's latents `own` are dead and among the n longest silent of all ranks, and so of all."""
    keys = _keys(sae).index_select(0, own)
    everybodys = sae.latents.group.gather(F.pad(keys, (0, n - len(keys)), value=-1)).flatten()
    bound = everybodys.topk(n).values[-1].clamp_min(sae.dead_after_tokens * sae.d_sae)
    return keys >= bound, everybodys >= bound


def _keys(sae: Sae) -> Tensor:
    """Return numbers by which latents of all ranks are ordered: by their silence, then the lower latent number."""
    return sae.n_tokens_since_fired * sae.d_sae + (sae.d_sae - 1 - sae.ids)


def _strongest(pre_acts: Tensor, k: int, group: Group) -> Tensor:
    """Return each token's k largest over all ranks where they are positive, 0 in place of the others [n_tokens, n].

    These ranks have the same tokens.
    """
    if group.size == 1:
        return top_k.strongest(pre_acts, k)
    columns, _, is_chosen = among_largest(PreActs(pre_acts), k, group)
    return pre_acts.relu() * torch.zeros_like(pre_acts, dtype=torch.bool).scatter(1, columns, is_chosen)


class _Explain(torch.autograd.Function):
    """A reconstruction from a few latents that are dead: acts W_dec, where acts is what `choose` makes of
    centred W_encᵀ + b_enc.

    Given are the weights of n latents as rows, W_enc [n, d_in], W_dec [n, d_out] and b_enc [n], and which of them are
    really dead; all have the type of `centred`, x − input_bias. By itself autograd would narrow each of the matrices
    twice over, and take two passes over [n_tokens, n] where one does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        centred: Tensor,
        input_bias: Tensor,
        b_enc: Tensor,
        W_enc: Tensor,
        W_dec: Tensor,
        is_dead: Tensor,
        choose: Callable[[Tensor], Tensor],
    ) -> Tensor:
        bias = torch.where(is_dead, b_enc, -torch.inf)
        acts = choose(torch.addmm(bias, centred, W_enc.T))
        ctx.save_for_backward(centred, acts, W_enc, W_dec)
        return acts @ W_dec

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        centred, acts, W_enc, W_dec = ctx.saved_tensors
        # 0 where a latent was not chosen, or is not active.
        grad_pre_acts = torch.ops.aten.threshold_backward(grad @ W_dec.T, acts, 0)
        grad_b_enc = grad_pre_acts.sum(dim=0)
        # Summing over tokens before multiplying turns a product with x's gradient into one vector's.
        grad_input_bias = -torch.mv(W_enc.T, grad_b_enc) if ctx.needs_input_grad[1] else None
        return None, grad_input_bias, grad_b_enc, grad_pre_acts.T @ centred, acts.T @ grad, None, None

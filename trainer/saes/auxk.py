"""AuxK: latents that have died learn to explain what the others leave over (Gao et al. 2024, arXiv 2406.04093)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.parallel.group import Group, part_summed
from trainer.saes.base import Sae
from trainer.saes.kernels import dead_latents, top_k
from trainer.saes.kernels.dead_latents import Weights
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.silence import take_variance
from trainer.saes.kernels.top_k_across_ranks import among_largest
from trainer.saes.losses import auxk_error
from trainer.saes.row_gradients import RowGradient


class Candidates(NamedTuple):
    """Latents [n] of this rank, each named once, from which each token gets its `n_chosen` strongest of all ranks'.

    `bias` [n] is what is added to their pre-activations, in the type of products: −∞ of those that are not dead.
    What they miss has a `weight`, 0-dim: 1 / the variance of the residual, or 0 if no rank has one that is dead.
    """

    latents: Tensor
    bias: Tensor
    weight: Tensor
    n_chosen: int


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
        candidates = self._candidates(sae, centred.dtype)
        choose = partial(_strongest, k=candidates.n_chosen, group=sae.latents.group)
        explained = part_summed(_explained(sae, centred, candidates, choose), sae.latents.group)
        return auxk_error(error, explained, candidates.weight)

    def learn_from(self, sums: Tensor) -> None:
        """Take in Σ‖y − x_hat‖² of this step, from which the next step's loss gets the residual's variance.

        A step's own sum would need an exchange between ranks before its backward pass. b_dec keeps the residual's mean
        near 0, so that its mean square is its variance.
        """
        take_variance(self.residual_variance, sums)

    def _candidates(self, sae: Sae, dtype: torch.dtype) -> Candidates:
        """Find the dead latents silent for longest, at most 2·k_aux on all ranks together, with biases of this type.

        So few that their dense products stay a small part of the step however many are dead; and a fixed number needs
        no answer from a GPU or from other ranks.
        """
        n, n_chosen = min(2 * self.k_aux, sae.d_sae), min(self.k_aux, sae.d_sae)
        has_all, n_own = sae.latents.group.size == 1, min(n, sae.n_own)
        given = sae.n_tokens_since_fired, sae.b_enc, self.residual_variance
        found = dead_latents.longest_silent(*given, sae.dead_after_tokens, n_own, dtype)
        if found and has_all:
            return Candidates(*found, n_chosen)
        # Many have been silent for equally long; the lower latent number comes first, whichever rank holds it.
        latents = found.latents if found else _longest_silent(sae, n_own)
        if has_all:
            is_candidate = are_candidates = sae.n_tokens_since_fired.index_select(0, latents) >= sae.dead_after_tokens
        else:
            is_candidate, are_candidates = _among_longest_silent(sae, latents, n)
        if not is_candidate.is_cuda:
            # Counting the dead is free here; without it 2 dead latents of 3,072 would cost as much as a whole step.
            n_own = max(1, int(is_candidate.sum()))
            n_chosen = max(1, min(n_chosen, int(are_candidates.sum())))
            latents, is_candidate = latents[:n_own], is_candidate[:n_own]
        bias = torch.where(is_candidate, sae.b_enc.detach().index_select(0, latents).to(dtype), -torch.inf)
        # The first has been silent for longest.
        is_any = are_candidates[0] if has_all else are_candidates.any()
        return Candidates(latents, bias, is_any / self.residual_variance, n_chosen)


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
    # On a GPU a topk of 64 bits is 33 kernels, and a sort 19, or 3 of up to 4,096 numbers.
    bound = everybodys.sort(descending=True).values[n - 1].clamp_min(sae.dead_after_tokens * sae.d_sae)
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


def _explained(sae: Sae, centred: Tensor, candidates: Candidates, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a reconstruction [n_tokens, d_out] from those candidates that `choose` takes for each token."""
    parameters = sae.W_enc, sae.b_enc, sae.W_dec, sae.input_bias
    leave = sae.row_gradients.leave
    explained: Tensor = _Explain.apply(centred, *parameters, candidates.latents, candidates.bias, choose, leave)  # type: ignore[no-untyped-call]
    return explained


class _Explain(torch.autograd.Function):
    """A reconstruction from a few latents that are dead: acts W_dec, where acts is what `choose` makes of
    centred W_encᵀ + bias.

    `centred` is x − input_bias in the type of products, as is the bias of these `latents`. The gradients of weights go
    to `leave` as rows; by itself autograd would narrow each of the matrices twice over, and take two passes over
    [n_tokens, n] where one does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        centred: Tensor,
        W_enc: Tensor,
        b_enc: Tensor,
        W_dec: Tensor,
        input_bias: Tensor,
        latents: Tensor,
        bias: Tensor,
        choose: Callable[[Tensor], Tensor],
        leave: Callable[[RowGradient], None],
    ) -> Tensor:
        reads, writes = dead_latents.rows(W_enc, W_dec, latents, centred.dtype)
        acts = choose(torch.addmm(bias, centred, reads.T))
        ctx.save_for_backward(centred, acts, reads, writes, latents)
        ctx.parameters, ctx.input_bias, ctx.leave = Weights(W_enc, b_enc, W_dec), input_bias, leave
        return acts @ writes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        centred, acts, reads, writes, latents = ctx.saved_tensors
        # 0 where a latent was not chosen, or is not active.
        grad_pre_acts = torch.ops.aten.threshold_backward(grad @ writes.T, acts, 0)
        grad_b_enc = grad_pre_acts.sum(dim=0)
        # Summing over tokens before multiplying turns a product with x's gradient into one vector's.
        input_bias, grad_centred = None, None
        if ctx.needs_input_grad[4]:
            input_bias, grad_centred = ctx.input_bias, torch.mv(reads.T, grad_b_enc)
        rows = Weights(grad_pre_acts.T @ centred, grad_b_enc, acts.T @ grad)
        ctx.leave(RowGradient(ctx.parameters, input_bias, latents, rows, grad_centred))
        return (None,) * 9

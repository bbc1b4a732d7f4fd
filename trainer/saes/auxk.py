"""AuxK: a loss that trains dead latents to reconstruct the error of the others (Gao et al. 2024, arXiv 2406.04093)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.parallel.group import Group, local_shard, wide
from trainer.saes.base import Sae
from trainer.saes.kernels import dead_latents, top_k
from trainer.saes.kernels.dead_latents import DeadLatents, Packed, Weights
from trainer.saes.kernels.since_fired import take_variance
from trainer.saes.losses import auxk_error
from trainer.saes.row_gradients import RowGradient

LONGEST_SINCE_FIRED = 2**31 - 1


class DeadCandidates(NamedTuple):
    """Latents that may reconstruct the error; the `n_chosen` with the largest activations do so for each token.

    `latents` [n] contains distinct indices on this rank, and −1 for latents of other ranks. `rows` are the latents'
    weights in the product dtype, with a bias of −∞ for latents that are not dead. Rows from other ranks are complete
    once the `transfers` have finished. `weight`, 0-dim, scales the loss: 1 / the variance of the residual, or 0 if no
    latent is dead.
    """

    latents: Tensor
    rows: Weights
    weight: Tensor
    n_chosen: int
    transfers: list[Any]


class Explained(NamedTuple):
    """The dead latents' reconstruction of this rank's y − x_hat [n_tokens, d_out], and the weight of its error."""

    reconstruction: Tensor
    weight: Tensor


class AuxK(nn.Module):
    """The auxiliary loss of one SAE, weighted by `alpha`; `k_aux` defaults to half of d_in."""

    residual_variance: Tensor

    def __init__(self, sae: Sae, k_aux: int | None, alpha: float) -> None:
        super().__init__()
        sae.reads_dead = True
        self.k_aux = min(k_aux or max(1, sae.d_in // 2), sae.d_sae)
        self.alpha = alpha
        self.register_buffer("residual_variance", torch.ones(()))

    @torch.no_grad()
    def candidates(self, sae: Sae, dtype: torch.dtype) -> DeadCandidates | None:
        """Return the latents that have been silent for longest, at most 2·k_aux over all ranks, with their weights.

        Because of the limit, the dense products of these latents take a small part of a step, however many latents are
        dead. Because their number is fixed, the host need not wait for a GPU or for other ranks. Return None if no
        latent is dead or the SAE is not in training.
        """
        if not self.alpha or not sae.training or not sae.may_have_dead():
            return None
        n, n_chosen = min(2 * self.k_aux, sae.d_sae), min(self.k_aux, sae.d_sae)
        own = _longest_silent(sae, min(n, sae.n_own), self.residual_variance, dtype)
        if sae.latents.group.size > 1:
            return _of_all_ranks(sae, own, n, n_chosen, self.residual_variance)
        if not own.bias.is_cuda:
            own = own.first(n := _n_dead(own.bias > -torch.inf, n))
        rows = dead_latents.rows(sae.W_enc, sae.W_dec, own.latents, dtype).weights
        return DeadCandidates(own.latents, rows._replace(b_enc=own.bias), own.weight, min(n, n_chosen), [])

    def explain(self, sae: Sae, centred: Tensor, candidates: DeadCandidates | None) -> Explained | None:
        """Reconstruct the error of this rank's tokens from the candidates.

        `centred` [n_tokens, d_in] is the encoder's input. Ranks that share the latents have the same `centred`.
        """
        if candidates is None:
            return None
        sae.latents.group.finish(candidates.transfers)
        own_tokens = local_shard(centred, sae.latents.group)
        return Explained(_explained(sae, own_tokens, candidates), candidates.weight)

    def loss(self, error: Tensor, explained: Explained | None) -> Tensor:
        """Return the fraction of the error's variance that dead latents do not explain, summed over tokens, 0-dim.

        `error` is x_hat − y of this rank's tokens [n_tokens, d_out]. The loss is 0 if `explained` is None.
        """
        return error.new_zeros(()) if explained is None else auxk_error(error, *explained)

    def learn_from(self, sums: Tensor) -> None:
        """Update the residual's variance for the next step's loss from Σ‖y − x_hat‖² of this step.

        Using the sum of the same step would need an exchange between ranks before the backward pass. b_dec keeps the
        residual's mean near 0, so its mean square is its variance.
        """
        take_variance(self.residual_variance, sums)


def _longest_silent(sae: Sae, n: int, variance: Tensor, dtype: torch.dtype) -> DeadLatents:
    """Return the n latents of this rank that have been silent for longest; on a CPU, the longest-silent is first."""
    since_fired = sae.n_tokens_since_fired
    if found := dead_latents.longest_since_fired(since_fired, sae.b_enc, variance, sae.dead_after_tokens, n, dtype):
        return found
    if since_fired.is_cuda:
        # The stable sort keeps ties in latent order. Sorting 32-bit keys takes 11 kernels; the top-k of 64-bit keys
        # takes 33.
        latents = since_fired.clamp_max(LONGEST_SINCE_FIRED).int().sort(stable=True, descending=True).indices[:n]
    else:
        latents = _order(sae).topk(n, largest=False).indices
    is_dead = since_fired.index_select(0, latents) >= sae.dead_after_tokens
    bias = torch.where(is_dead, sae.b_enc.index_select(0, latents).to(dtype), -torch.inf)
    return DeadLatents(latents, bias, is_dead.any() / variance)


def _order(sae: Sae) -> Tensor:
    """Return a sort key for each latent of this rank, comparable across ranks: the longest-silent latent comes first.

    Ties are broken by latent index. Silence is capped at 2^31 − 1 tokens.
    """
    return torch.sub(sae.ids, sae.n_tokens_since_fired.clamp_max(LONGEST_SINCE_FIRED), alpha=sae.d_sae)


def _of_all_ranks(sae: Sae, own: DeadLatents, n: int, n_chosen: int, variance: Tensor) -> DeadCandidates:
    """Return the n latents of all ranks that have been silent for longest; `own` are the candidates of this rank.

    Each rank fills in the weights of the latents that it holds and zeros for the others, so the sum over ranks is
    exact. The number of these latents on one rank depends on the data. It may be n, so blocks of a smaller fixed size
    would not suffice.
    """
    group, dtype = sae.latents.group, own.bias.dtype
    order = _order(sae).index_select(0, own.latents)
    gathered = group.gather(F.pad(order, (0, n - len(order)), value=sae.d_sae)).flatten()
    is_dead = gathered < sae.d_sae * (1 - sae.dead_after_tokens)
    if not order.is_cuda:
        n = _n_dead(is_dead, n)
    # A latent's position is the number of latents before it, or n if it is not among the first n. For 6,144 values,
    # sorting takes 19 GPU kernels and counting takes 4. `sum` would copy a bool tensor to 64 bits.
    is_before = own.bias.new_empty(len(order), len(gathered), dtype=torch.bfloat16)
    torch.lt(gathered, order[:, None], out=is_before)
    indices = is_before.sum(dim=1, dtype=torch.float32).long().clamp_max(n)
    latents = order.new_full((n + 1,), -1).scatter_(0, indices, own.latents)[:n]
    packed = dead_latents.rows(sae.W_enc, sae.W_dec, latents, dtype)
    packed.weights.b_enc.copy_(own.bias.new_zeros(n + 1).scatter_(0, indices, own.bias)[:n])
    transfers = group.start_sums([packed.flat])
    return DeadCandidates(latents, packed.weights, is_dead.any() / variance, min(n, n_chosen), transfers)


def _n_dead(is_dead: Tensor, n: int) -> int:
    """Return how many of n candidates are dead, but at least 1.

    Counting is cheap on a CPU. If all n candidates were used instead, 2 dead latents out of 3,072 would double the time
    of a step.
    """
    return max(1, min(n, int(is_dead.sum())))


def _explained(sae: Sae, centred: Tensor, candidates: DeadCandidates) -> Tensor:
    """Return a reconstruction [n_tokens, d_out] from each token's strongest candidates."""
    parameters = sae.W_enc, sae.b_enc, sae.W_dec, sae.input_bias
    leave = sae.row_gradients.leave
    explained: Tensor = _Explain.apply(centred, *parameters, candidates, sae.latents.group, leave)  # type: ignore[no-untyped-call]
    return explained


class _Explain(torch.autograd.Function):
    """The reconstruction acts @ W_dec from a few dead latents, where acts are the largest of centred @ W_encᵀ + b_enc.

    `centred` is x − input_bias in the product dtype. The gradients of the weights are passed to `leave` as rows. Plain
    autograd would convert each matrix to the narrow dtype twice, and make two passes over [n_tokens, n] instead of one.
    """

    @staticmethod
    def forward(
        ctx: Any,
        centred: Tensor,
        W_enc: Tensor,
        b_enc: Tensor,
        W_dec: Tensor,
        input_bias: Tensor,
        candidates: DeadCandidates,
        group: Group,
        leave: Callable[[RowGradient], None],
    ) -> Tensor:
        reads, bias, writes = candidates.rows
        acts = top_k.strongest(torch.addmm(bias, centred, reads.T), candidates.n_chosen)
        ctx.save_for_backward(centred, acts, reads, writes, candidates.latents)
        ctx.parameters, ctx.input_bias = Weights(W_enc, b_enc, W_dec), input_bias
        ctx.group, ctx.leave = group, leave
        return acts @ writes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        centred, acts, reads, writes, latents = ctx.saved_tensors
        # The gradient is 0 where a latent was not chosen or is inactive.
        grad_pre_acts = torch.ops.aten.threshold_backward(grad @ writes.T, acts, 0)
        grad_b_enc = grad_pre_acts.sum(dim=0)
        # Sum over tokens first, so that a matrix–vector product suffices and the gradient of x is not needed.
        input_bias, grad_centred = None, None
        if ctx.needs_input_grad[4]:
            input_bias, grad_centred = ctx.input_bias, torch.mv(reads.T, grad_b_enc)
        rows = Weights(grad_pre_acts.T @ centred, grad_b_enc, acts.T @ grad)
        rows, arrive = _start_sum(rows, ctx.group)
        ctx.leave(RowGradient(ctx.parameters, input_bias, latents, rows, grad_centred, arrive))
        return (None,) * 8


def _start_sum(rows: Weights, group: Group) -> tuple[Weights, Callable[[], None]]:
    """Start to sum fp32 gradients over all ranks; return the sums and a function that waits until they are complete."""
    if group.size == 1:
        return rows, lambda: None
    summed = Packed.of(rows.W_enc, len(rows.b_enc), rows.W_enc.shape[1], rows.W_dec.shape[1], wide(rows.b_enc).dtype)
    for total, part in zip(summed.weights, rows, strict=True):
        total.copy_(part)
    return summed.weights, partial(group.finish, group.start_sums([summed.flat]))

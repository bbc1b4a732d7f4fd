"""AuxK: latents that have died learn to explain what the others leave over (Gao et al. 2024, arXiv 2406.04093)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.parallel.group import Group, own_part, wide
from trainer.saes.base import Sae
from trainer.saes.kernels import dead_latents, top_k
from trainer.saes.kernels.dead_latents import Packed, Silent, Weights
from trainer.saes.kernels.silence import take_variance
from trainer.saes.losses import auxk_error
from trainer.saes.row_gradients import RowGradient

LONGEST_SILENCE = 2**31 - 1


class Candidates(NamedTuple):
    """Latents [n] from which each token gets its `n_chosen` strongest.

    `latents` are their numbers on this rank, each once, and −1 for those that another rank holds. `rows` are their
    weights in the type of products, with a bias of −∞ for those that are not dead; other ranks' have arrived once the
    `transfers` have ended. What they miss has a `weight`, 0-dim: 1 / the variance of the residual, or 0 if none is
    dead.
    """

    latents: Tensor
    rows: Weights
    weight: Tensor
    n_chosen: int
    transfers: list[Any]


class Explained(NamedTuple):
    """What dead latents reconstruct of this rank's y − x_hat [n_tokens, d_out], and the weight of what is left."""

    reconstruction: Tensor
    weight: Tensor


class AuxK(nn.Module):
    """The auxiliary loss of one SAE, weighted by `alpha`; k_aux defaults to half of d_in."""

    residual_variance: Tensor

    def __init__(self, d_in: int, d_sae: int, k_aux: int | None, alpha: float) -> None:
        super().__init__()
        self.k_aux = min(k_aux or max(1, d_in // 2), d_sae)
        self.alpha = alpha
        self.register_buffer("residual_variance", torch.ones(()))

    @torch.no_grad()
    def candidates(self, sae: Sae, dtype: torch.dtype) -> Candidates | None:
        """Find the dead latents silent for longest, at most 2·k_aux on all ranks together, with weights of this type.

        So few that their dense products stay a small part of the step however many are dead; and a fixed number needs
        no answer from a GPU or from other ranks. None: no latent is dead, or the SAE is not in training.
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
        return Candidates(own.latents, rows._replace(b_enc=own.bias), own.weight, min(n, n_chosen), [])

    def explain(self, sae: Sae, centred: Tensor, candidates: Candidates | None) -> Explained | None:
        """Explain the error of this rank's tokens by candidates; `centred` is what the encoder reads [n_tokens, d_in].

        Ranks that share the latents have the same `centred`.
        """
        if candidates is None:
            return None
        sae.latents.group.finish(candidates.transfers)
        own_tokens = own_part(centred, sae.latents.group)
        return Explained(_explained(sae, own_tokens, candidates), candidates.weight)

    def loss(self, error: Tensor, explained: Explained | None) -> Tensor:
        """Return the share of the error's variance that dead latents leave unexplained, summed over tokens, 0-dim.

        `error` is x_hat − y of this rank's tokens [n_tokens, d_out]. The loss is 0 if nothing is explained.
        """
        return error.new_zeros(()) if explained is None else auxk_error(error, *explained)

    def learn_from(self, sums: Tensor) -> None:
        """Take in Σ‖y − x_hat‖² of this step, from which the next step's loss gets the residual's variance.

        A step's own sum would need an exchange between ranks before its backward pass. b_dec keeps the residual's mean
        near 0, so that its mean square is its variance.
        """
        take_variance(self.residual_variance, sums)


def _longest_silent(sae: Sae, n: int, variance: Tensor, dtype: torch.dtype) -> Silent:
    """Return the n latents of this rank that have been silent for longest, on a CPU in this order."""
    silence = sae.n_tokens_since_fired
    if found := dead_latents.longest_silent(silence, sae.b_enc, variance, sae.dead_after_tokens, n, dtype):
        return found
    if silence.is_cuda:
        # Equal numbers keep the order of latents. Sorting 32 bits takes 11 kernels where the top of 64 bits takes 33.
        latents = silence.clamp_max(LONGEST_SILENCE).int().sort(stable=True, descending=True).indices[:n]
    else:
        latents = _order(sae).topk(n, largest=False).indices
    is_dead = silence.index_select(0, latents) >= sae.dead_after_tokens
    bias = torch.where(is_dead, sae.b_enc.index_select(0, latents).to(dtype), -torch.inf)
    return Silent(latents, bias, is_dead.any() / variance)


def _order(sae: Sae) -> Tensor:
    """Return numbers that order the latents of all ranks: the longest silent first, of equals the lower number.

    A latent that was silent for 2^31 tokens is as dead as any that was for longer.
    """
    return torch.sub(sae.ids, sae.n_tokens_since_fired.clamp_max(LONGEST_SILENCE), alpha=sae.d_sae)


def _of_all_ranks(sae: Sae, own: Silent, n: int, n_chosen: int, variance: Tensor) -> Candidates:
    """Return the n latents of all ranks that have been silent for longest, of which this rank has at most its `own`.

    Each rank fills in the weights of its own, zeros elsewhere, and the sum over the ranks is exact. How many a rank
    holds depends on the data: parts of a fixed size would not suffice for any rank that holds all of them.
    """
    group, dtype = sae.latents.group, own.bias.dtype
    order = _order(sae).index_select(0, own.latents)
    everybodys = group.gather(F.pad(order, (0, n - len(order)), value=sae.d_sae)).flatten()
    is_dead = everybodys < sae.d_sae * (1 - sae.dead_after_tokens)
    if not order.is_cuda:
        n = _n_dead(is_dead, n)
    # A latent's place is the number of those before it, and n where it is not among the first n. To sort 6,144 numbers
    # takes a GPU 19 kernels, to count them 4. Of a bool, sum would make a copy in 64 bits.
    is_before = own.bias.new_empty(len(order), len(everybodys), dtype=torch.bfloat16)
    torch.lt(everybodys, order[:, None], out=is_before)
    places = is_before.sum(dim=1, dtype=torch.float32).long().clamp_max(n)
    latents = order.new_full((n + 1,), -1).scatter_(0, places, own.latents)[:n]
    packed = dead_latents.rows(sae.W_enc, sae.W_dec, latents, dtype)
    packed.weights.b_enc.copy_(own.bias.new_zeros(n + 1).scatter_(0, places, own.bias)[:n])
    transfers = group.start_sums([packed.flat])
    return Candidates(latents, packed.weights, is_dead.any() / variance, min(n, n_chosen), transfers)


def _n_dead(is_dead: Tensor, n: int) -> int:
    """Return how many of n candidates are dead, but at least 1. Counting costs nothing on a CPU; without it 2 dead
    latents of 3,072 would cost as much as a whole step."""
    return max(1, min(n, int(is_dead.sum())))


def _explained(sae: Sae, centred: Tensor, candidates: Candidates) -> Tensor:
    """Return a reconstruction [n_tokens, d_out] from each token's strongest candidates."""
    parameters = sae.W_enc, sae.b_enc, sae.W_dec, sae.input_bias
    leave = sae.row_gradients.leave
    explained: Tensor = _Explain.apply(centred, *parameters, candidates, sae.latents.group, leave)  # type: ignore[no-untyped-call]
    return explained


class _Explain(torch.autograd.Function):
    """A reconstruction from a few latents that are dead: acts W_dec, where acts are the strongest of
    centred W_encᵀ + b_enc.

    `centred` is x − input_bias in the type of products. The gradients of weights go to `leave` as rows; by itself
    autograd would narrow each of the matrices twice over, and take two passes over [n_tokens, n] where one does.
    """

    @staticmethod
    def forward(
        ctx: Any,
        centred: Tensor,
        W_enc: Tensor,
        b_enc: Tensor,
        W_dec: Tensor,
        input_bias: Tensor,
        candidates: Candidates,
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
        # 0 where a latent was not chosen, or is not active.
        grad_pre_acts = torch.ops.aten.threshold_backward(grad @ writes.T, acts, 0)
        grad_b_enc = grad_pre_acts.sum(dim=0)
        # Summing over tokens before multiplying turns a product with x's gradient into one vector's.
        input_bias, grad_centred = None, None
        if ctx.needs_input_grad[4]:
            input_bias, grad_centred = ctx.input_bias, torch.mv(reads.T, grad_b_enc)
        rows = Weights(grad_pre_acts.T @ centred, grad_b_enc, acts.T @ grad)
        rows, arrive = _start_sum(rows, ctx.group)
        ctx.leave(RowGradient(ctx.parameters, input_bias, latents, rows, grad_centred, arrive))
        return (None,) * 8


def _start_sum(rows: Weights, group: Group) -> tuple[Weights, Callable[[], None]]:
    """Begin to add up gradients over the tokens of all ranks, in fp32; return them, and what waits for their end."""
    if group.size == 1:
        return rows, lambda: None
    summed = Packed.of(rows.W_enc, len(rows.b_enc), rows.W_enc.shape[1], rows.W_dec.shape[1], wide(rows.b_enc).dtype)
    for total, part in zip(summed.weights, rows, strict=True):
        total.copy_(part)
    return summed.weights, partial(group.finish, group.start_sums([summed.flat]))

"""AuxK: a loss that makes dead latents reconstruct the error of live latents (Gao et al. 2024, arXiv 2406.04093)."""

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
    """Candidates for reconstructing the error; for each token, the `n_chosen` largest activations are used.

    `latents` [n] contains distinct indices on this rank, with −1 for latents on other ranks. `rows` are the latents'
    weights in the matmul dtype, with a bias of −∞ for latents that are not dead. Rows from other ranks are valid only
    after the `transfers` have finished. `weight` (0-dim) is the factor for the loss: 1 / (the residual's variance), or
    0 if no latent is dead.
    """

    latents: Tensor
    rows: Weights
    weight: Tensor
    n_chosen: int
    transfers: list[Any]


class Explained(NamedTuple):
    """The dead latents' reconstruction of this rank's y − x_hat [n_tokens, d_out], and the AuxK loss weight."""

    reconstruction: Tensor
    weight: Tensor


class AuxK(nn.Module):
    """The auxiliary loss for one SAE, weighted by `alpha`; `k_aux` defaults to half of d_in."""

    residual_variance: Tensor

    def __init__(self, sae: Sae, k_aux: int | None, alpha: float) -> None:
        super().__init__()
        sae.reads_dead = True
        self.k_aux = min(k_aux or max(1, sae.d_in // 2), sae.d_sae)
        self.alpha = alpha
        self.register_buffer("residual_variance", torch.ones(()))

    @torch.no_grad()
    def candidates(self, sae: Sae, dtype: torch.dtype) -> DeadCandidates | None:
        """Return the longest-silent latents, at most 2·k_aux over all ranks, with their weights.

        The limit keeps the dense matmuls for these latents to a small fraction of the step time, no matter how many
        latents are dead. The number of candidates is fixed, so the host does not have to wait for a GPU or for other
        ranks. Return None if no latent is dead or the SAE is not in training mode.
        """
        if not self.alpha or not sae.training or not sae.may_have_dead():
            return None
        n, n_chosen = min(2 * self.k_aux, sae.d_sae), min(self.k_aux, sae.d_sae)
        own = _longest_silent(sae, min(n, sae.n_own), self.residual_variance, dtype)
        if sae.latents.group.size > 1:
            return _of_all_ranks(sae, own, n, n_chosen, self.residual_variance)
        if not own.bias.is_cuda:
            own = own.first(n := _n_dead(own.bias > -torch.inf, n))
        rows = dead_latents.rows(sae.W_enc, sae.W_dec, own.latents, dtype, sae.d_out).weights
        return DeadCandidates(own.latents, rows._replace(b_enc=own.bias), own.weight, min(n, n_chosen), [])

    def explain(self, sae: Sae, centred: Tensor, candidates: DeadCandidates | None) -> Explained | None:
        """Reconstruct the error on this rank's tokens from the candidates.

        `centred` [n_tokens, d_in] is the encoder's input. Ranks that share the latents have the same `centred`.
        """
        if candidates is None:
            return None
        sae.latents.group.finish(candidates.transfers)
        own_tokens = local_shard(centred, sae.latents.group)
        return Explained(_explained(sae, own_tokens, candidates), candidates.weight)

    def loss(self, error: Tensor, explained: Explained | None) -> Tensor:
        """Return the fraction of the error variance that dead latents do not explain, summed over tokens, 0-dim.

        `error` is x_hat − y for this rank's tokens [n_tokens, d_out]. The loss is 0 if `explained` is None.
        """
        return error.new_zeros(()) if explained is None else auxk_error(error, *explained)

    def learn_from(self, sums: Tensor) -> None:
        """Use this step's Σ‖y − x_hat‖² to update the residual variance, which scales the next step's loss.

        Scaling the loss by the same step's sum would require communication between ranks before the backward pass.
        Since b_dec keeps the residual's mean near 0, the residual's mean square is its variance.
        """
        take_variance(self.residual_variance, sums)


def _longest_silent(sae: Sae, n: int, variance: Tensor, dtype: torch.dtype) -> DeadLatents:
    """Return this rank's n longest-silent latents; on CPU, the longest-silent latent comes first."""
    since_fired = sae.n_tokens_since_fired
    if found := dead_latents.longest_since_fired(since_fired, sae.b_enc, variance, sae.dead_after_tokens, n, dtype):
        return found
    if since_fired.is_cuda:
        # A stable sort breaks ties by latent index. Sorting 32-bit keys launches 11 kernels; a top-k over 64-bit keys
        # launches 33.
        latents = since_fired.clamp_max(LONGEST_SINCE_FIRED).int().sort(stable=True, descending=True).indices[:n]
    else:
        latents = _order(sae).topk(n, largest=False).indices
    is_dead = since_fired.index_select(0, latents) >= sae.dead_after_tokens
    bias = torch.where(is_dead, sae.b_enc.index_select(0, latents).to(dtype), -torch.inf)
    return DeadLatents(latents, bias, is_dead.any() / variance)


def _order(sae: Sae) -> Tensor:
    """Return a sort key for each latent on this rank, comparable across ranks; longer silence means a smaller key.

    Ties are broken by latent index. Silence is capped at 2^31 − 1 tokens.
    """
    return torch.sub(sae.ids, sae.n_tokens_since_fired.clamp_max(LONGEST_SINCE_FIRED), alpha=sae.d_sae)


def _of_all_ranks(sae: Sae, own: DeadLatents, n: int, n_chosen: int, variance: Tensor) -> DeadCandidates:
    """Return the n longest-silent latents over all ranks; `own` are this rank's candidates.

    Each rank fills in the weights of its own latents, and zeros for all other latents, so the sum over ranks is exact.
    How many of the n latents belong to a given rank depends on the data. A single rank may hold all n latents, so
    smaller fixed-size blocks would not suffice.
    """
    group, dtype = sae.latents.group, own.bias.dtype
    order = _order(sae).index_select(0, own.latents)
    gathered = group.gather(F.pad(order, (0, n - len(order)), value=sae.d_sae)).flatten()
    is_dead = gathered < sae.d_sae * (1 - sae.dead_after_tokens)
    if not order.is_cuda:
        n = _n_dead(is_dead, n)
    # A latent's position is the number of latents before it, at most n. Sorting 6,144 values would launch 19 GPU
    # kernels; counting launches 4. For a bool tensor, `sum` would first make a 64-bit copy.
    is_before = own.bias.new_empty(len(order), len(gathered), dtype=torch.bfloat16)
    torch.lt(gathered, order[:, None], out=is_before)
    indices = is_before.sum(dim=1, dtype=torch.float32).long().clamp_max(n)
    latents = order.new_full((n + 1,), -1).scatter_(0, indices, own.latents)[:n]
    packed = dead_latents.rows(sae.W_enc, sae.W_dec, latents, dtype, sae.d_out)
    packed.weights.b_enc.copy_(own.bias.new_zeros(n + 1).scatter_(0, indices, own.bias)[:n])
    transfers = group.start_sums([packed.flat])
    return DeadCandidates(latents, packed.weights, is_dead.any() / variance, min(n, n_chosen), transfers)


def _n_dead(is_dead: Tensor, n: int) -> int:
    """Return the number of dead latents among the n candidates, or 1 if there are none.

    Counting is cheap on CPU. If all n candidates were used instead, even 2 dead latents out of 3,072 would double the
    step time.
    """
    return max(1, min(n, int(is_dead.sum())))


def _explained(sae: Sae, centred: Tensor, candidates: DeadCandidates) -> Tensor:
    """Return a reconstruction [n_tokens, d_out] from each token's strongest candidates."""
    parameters = sae.W_enc, sae.b_enc, sae.W_dec, sae.input_bias
    leave = sae.row_gradients.leave
    explained: Tensor = _Explain.apply(centred, *parameters, candidates, sae.latents.group, leave)  # type: ignore[no-untyped-call]
    return explained


class _Explain(torch.autograd.Function):
    """Reconstructs the error as `acts @ W_dec`. `acts` are dead latents' largest values of `centred @ W_encᵀ + b_enc`.

    `centred` is x − input_bias in the matmul dtype. The weight gradients are passed to `leave` as one row per latent.
    Plain autograd would convert each matrix to the narrow dtype twice, and would make two passes over [n_tokens, n]
    rather than one.
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
        # Sum over tokens first: a matrix–vector product then suffices, and the gradient of x is not needed.
        input_bias, grad_centred = None, None
        if ctx.needs_input_grad[4]:
            input_bias, grad_centred = ctx.input_bias, torch.mv(reads.T, grad_b_enc)
        rows = Weights(grad_pre_acts.T @ centred, grad_b_enc, acts.T @ grad)
        rows, arrive = _start_sum(rows, ctx.group)
        ctx.leave(RowGradient(ctx.parameters, input_bias, latents, rows, grad_centred, arrive))
        return (None,) * 8


def _start_sum(rows: Weights, group: Group) -> tuple[Weights, Callable[[], None]]:
    """Start summing fp32 gradients over all ranks; return the sums and a function that waits for them to complete."""
    if group.size == 1:
        return rows, lambda: None
    summed = Packed.of(rows.W_enc, len(rows.b_enc), rows.W_enc.shape[1], rows.W_dec.shape[1], wide(rows.b_enc).dtype)
    for total, part in zip(summed.weights, rows, strict=True):
        total.copy_(part)
    return summed.weights, partial(group.finish, group.start_sums([summed.flat]))

"""Matryoshka BatchTopK SAE (Bussmann et al. 2025, arXiv 2503.17547)."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.contract.settings.architectures import MatryoshkaSettings
from trainer.parallel.group import local_shard, reduce_scatter
from trainer.saes.base import Declared, Output, SaeSpec
from trainer.saes.batch_topk import BatchTopK
from trainer.saes.kernels.encode import centre
from trainer.saes.kernels.sparse import Gradients, decode, decoded_by_kernels, gradient_dtype
from trainer.saes.losses import Errors, errors_of, triton_for
from trainer.saes.sparse_acts import Acts, DenseActs, SparseActs


class MatryoshkaBatchTopK(BatchTopK):
    """A BatchTopK SAE in which the first d_sae / 2, d_sae / 4, … latents also reconstruct the target by themselves.

    The loss is the mean over `n_levels` prefixes, including the full dictionary. Small prefixes therefore learn general
    features, which more specific features would otherwise absorb.
    """

    traits = BatchTopK.traits._replace(losses=("mse", "inner_mse", "auxk"))
    settings: MatryoshkaSettings
    level_of: Tensor

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__(spec)
        # In a tiny dictionary, the smallest levels can have the same width.
        self.widths = sorted({-(-self.d_sae // 2**level) for level in range(self.settings.n_levels)})
        level_of = torch.bucketize(torch.arange(self.d_sae), torch.tensor(self.widths), right=True)
        self.declared["level_of"] = Declared(0)
        self.register_buffer("level_of", level_of, persistent=False)

    def forward(self, x: Tensor, y: Tensor) -> Output:
        centred = centre(x, self.input_bias)
        acts, explained = self._encode_and_explain(centred)
        x_hat, errors, inner_mse = self._nested_by_kernels(acts, y) or self._nested(
            self._parts(acts), self.offset(local_shard(x, self.latents.group)), y
        )
        output = self._score(explained, acts, x_hat, errors)
        return output._replace(losses=output.losses | {"inner_mse": inner_mse})

    def _nested_by_kernels(self, acts: Acts, y: Tensor) -> tuple[Tensor, Errors, Tensor] | None:
        """Return the result of `_nested` from kernels that decode all levels, or None if they cannot be used."""
        kernels = self.kernels_of_errors(y)
        if kernels is None or isinstance(acts, DenseActs):
            return None
        decoded = decoded_by_kernels(self._by_level(acts), self.W_dec)
        if decoded is None:
            return None
        of, n_levels = (decoded.acts, decoded.rows), len(self.widths)
        found = kernels.nested_bags(*of, n_levels, self.b_dec.detach(), y, self.y_mean)
        sums = found.sums.error.square, found.inner
        square, inner = decoded.with_gradients(self.b_dec, partial(_gradients, kernels), (found.errors,), sums)
        return found.x_hat, Errors(square, found.errors[:, -1], found.sums), inner

    def _nested(self, parts: Tensor, offset: Tensor, y: Tensor) -> tuple[Tensor, Errors, Tensor]:
        """Return x_hat with its errors, and Σ‖y − x_hat‖² summed over all prefixes except the full dictionary."""
        # If kernels compute x_hat, it has no gradient; training does not need one.
        triton = triton_for(y, parts, offset) if self.training else None
        if triton is None:
            x_hat, inner = _PrefixErrors.apply(parts, offset, y)  # type: ignore[no-untyped-call]
            return x_hat, errors_of(y, x_hat, self.y_mean), inner
        found = triton.nested(parts.detach(), offset.detach(), y, self.y_mean)
        known = found.errors, found.sums.error.square, found.inner, triton
        square, inner = _KnownNested.apply(parts, offset, *known)  # type: ignore[no-untyped-call]
        return found.x_hat, Errors(square, found.errors[:, -1], found.sums), inner

    def _parts(self, acts: Acts) -> Tensor:
        """Return each level's output for this rank's tokens, [n_tokens, n_levels, d_out], decoded in one pass."""
        group = self.latents.group
        if isinstance(acts, SparseActs):
            return decode(self._by_level(acts), self.W_dec, group, len(self.widths))
        return reduce_scatter(self._dense_parts(acts), group, gradient_dtype(self.W_dec))

    def _by_level(self, acts: SparseActs) -> SparseActs:
        """Regroup the activations so that each (token, level) pair has its own token index.

        A token's entries are ordered by latent, and therefore by level.
        """
        n_levels, n_tokens = len(self.widths), len(acts.indices.starts)
        bags = torch.add(acts.at(self.level_of), acts.indices.tokens, alpha=n_levels)
        return acts._replace(indices=acts.indices.regroup(bags, n_tokens * n_levels))

    def _dense_parts(self, acts: DenseActs) -> Tensor:
        sizes = self.level_of.bincount(minlength=len(self.widths)).tolist()
        slices = zip(acts.values.split(sizes, dim=1), self.W_dec.split(sizes), strict=True)
        return torch.stack([values @ rows for values, rows in slices], dim=1)

    def objective(self, losses: dict[str, Tensor]) -> Tensor:
        whole_and_inner = (losses["mse"] + losses["inner_mse"]) / len(self.widths)
        return super().objective(losses | {"mse": whole_and_inner})


def _gradients(kernels: ModuleType, errors: Tensor, *grads_and_dtype: Any) -> Gradients:
    return Gradients(*kernels.nested_gradients(errors, *grads_and_dtype))


class _PrefixErrors(torch.autograd.Function):
    """x_hat, and Σ‖y − x_hat‖² summed over all prefixes except the full dictionary, from the output of each level.

    `offset`, [d_out] or [n_tokens, d_out], is added to every prefix.

    With `cumsum`, whose gradient flips the tensor twice, a step would take 330 ms on one core instead of 220 ms (4,096
    tokens, d_in = 384, d_sae = 3,072, k = 32).
    """

    @staticmethod
    def forward(ctx: Any, parts: Tensor, offset: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        errors, before = torch.empty_like(parts), offset - y
        ctx.is_vector = offset.dim() == 1
        for level in range(parts.shape[1]):
            before = torch.add(parts[:, level], before, out=errors[:, level])
        ctx.save_for_backward(errors)
        # A matrix of squares would double the memory. On CPU, a single norm over all values would be off by several
        # percent.
        return y + before, torch.linalg.vector_norm(errors[:, :-1], dim=2).square().sum()

    @staticmethod
    def backward(ctx: Any, grad_x_hat: Tensor, grad_inner: Tensor) -> tuple[Tensor | None, ...]:
        (errors,) = ctx.saved_tensors
        # The factor is a vector, since multiplication by a scalar tensor is not vectorised on CPU.
        twice = (2 * grad_inner).repeat(errors.shape[2])
        grad, above = torch.empty_like(errors), grad_x_hat
        grad[:, -1] = grad_x_hat
        for level in reversed(range(errors.shape[1] - 1)):
            above = torch.addcmul(above, errors[:, level], twice, out=grad[:, level])
        return grad, grad[:, 0].sum(dim=0) if ctx.is_vector else grad[:, 0], None


class _KnownNested(torch.autograd.Function):
    """The sums of squared errors, already computed by kernels, differentiable with respect to `parts` and `offset`."""

    @staticmethod
    def forward(
        ctx: Any, parts: Tensor, offset: Tensor, errors: Tensor, square: Tensor, inner: Tensor, triton: ModuleType
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(errors)
        ctx.is_vector, ctx.triton = offset.dim() == 1, triton
        return square.view_as(square), inner.view_as(inner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_square: Tensor, grad_inner: Tensor) -> tuple[Tensor | None, ...]:
        (errors,) = ctx.saved_tensors
        grad, total = ctx.triton.nested_gradients(errors, grad_square, grad_inner)
        return grad, total if ctx.is_vector else grad[:, 0], None, None, None, None

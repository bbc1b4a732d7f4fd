"""TopK SAEs whose reconstruction is a sum of levels; every prefix of the levels also reconstructs the target."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.parallel.group import local_shard
from trainer.saes.base import Output
from trainer.saes.kernels.encode import centre
from trainer.saes.kernels.sparse import DecoderGradients, decode, decoded_by_kernels
from trainer.saes.losses import Errors, errors_of, triton_for
from trainer.saes.sparse_acts import Acts, DenseActs, SparseActs
from trainer.saes.topk import TopK


class Nested(TopK):
    """A TopK SAE that assigns each activation to one of `n_levels` levels; a subclass defines `_by_level`.

    The loss is the weighted mean of the squared errors of all prefixes of the levels, including the full
    reconstruction. Its parts are the loss terms "mse", for the full reconstruction, and "inner_mse", for all other
    prefixes.
    """

    n_levels: int
    # The weight of the full reconstruction's error in the mean, relative to that of each other prefix.
    full_weight = 1.0

    def forward(self, x: Tensor, y: Tensor) -> Output:
        centred = centre(x, self.input_bias)
        acts, explained = self._encode_and_explain(centred)
        x_hat, errors, inner_mse = self._nested_by_kernels(acts, y) or self._nested(
            self._parts(acts), self.offset(local_shard(x, self.latents.group)), y
        )
        output = self._score(explained, acts, x_hat, errors)
        return output._replace(losses=output.losses | {"inner_mse": inner_mse})

    def _by_level(self, acts: SparseActs) -> SparseActs:
        """Regroup the activations so that each (token, level) pair has its own token index, token · n_levels + level.

        The entries keep their order, so a token's entries must already be ordered by level.
        """
        raise NotImplementedError

    def _nested_by_kernels(self, acts: Acts, y: Tensor) -> tuple[Tensor, Errors, Tensor] | None:
        """Compute `_nested` with kernels that decode all levels; return None if these kernels cannot be used."""
        kernels = self.kernels_of_errors(y)
        if kernels is None or isinstance(acts, DenseActs):
            return None
        decoded = decoded_by_kernels(self._by_level(acts), self.W_dec)
        if decoded is None:
            return None
        of = decoded.acts, decoded.rows
        found = kernels.nested_bags(*of, self.n_levels, self.b_dec.detach(), y, self.y_mean)
        sums = found.sums.error.square, found.inner
        square, inner = decoded.with_gradients(self.b_dec, partial(_gradients, kernels), (found.errors,), sums)
        return found.x_hat, Errors(square, found.errors[:, -1], found.sums), inner

    def _nested(self, parts: Tensor, offset: Tensor, y: Tensor) -> tuple[Tensor, Errors, Tensor]:
        """Return x_hat with its errors, and Σ‖y − x_hat‖² summed over all prefixes except the full reconstruction."""
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
        assert isinstance(acts, SparseActs)
        return decode(self._by_level(acts), self.W_dec, self.latents.group, self.n_levels)

    def objective(self, losses: dict[str, Tensor]) -> Tensor:
        weighted = torch.add(losses["inner_mse"], losses["mse"], alpha=self.full_weight)
        mean = weighted / (self.full_weight + self.n_levels - 1)
        return super().objective(losses | {"mse": mean})


def _gradients(kernels: ModuleType, errors: Tensor, *grads_and_dtype: Any) -> DecoderGradients:
    return DecoderGradients(*kernels.nested_gradients(errors, *grads_and_dtype))


class _PrefixErrors(torch.autograd.Function):
    """Computes x_hat, and Σ‖y − x_hat‖² summed over all prefixes except the full one, from each level's output.

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
    """Makes sums of squared errors, computed by kernels, differentiable with respect to `parts` and `offset`."""

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

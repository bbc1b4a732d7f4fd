"""Gradients of a few latents' weights, added as rows to those of all latents.

Autograd would spread them out over a matrix of all latents and add that: with 65,536 latents of width 2,304, of which
2,304 have one, 3.6 GB go through memory for 42 MB of gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainer.runtime import row_measures
from trainer.runtime.narrow_copy import kept_or_own
from trainer.saes.kernels.sparse import add_rows


class RowGradient(NamedTuple):
    """The gradient `rows` [n, ...] of the weights of some latents, given by number [n], each once.

    They lie along `dim` of a parameter.
    """

    parameter: Tensor
    dim: int
    latents: Tensor
    rows: Tensor

    def add_to(self, whole: Tensor) -> None:
        """Add the rows to a gradient of all latents, of the parameter's shape."""
        add_rows(whole.movedim(self.dim, 0), self.latents, self.rows)


class RowGradients:
    """The gradients of rows that a backward pass has left; whoever calls it calls `add` when it is over."""

    def __init__(self) -> None:
        self._left: list[RowGradient] = []

    def rows(self, parameter: Tensor, latents: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """Return the weights [n, ...] of some latents [n], named once each, which lie along `dim` of a parameter.

        They have the type of products, `dtype`: where that is narrower they come from the copy that products read.
        """
        rows: Tensor = _Rows.apply(parameter, dim, latents, dtype, self._left)  # type: ignore[no-untyped-call]
        return rows

    def take(self) -> list[RowGradient]:
        """Return what was left since the last call."""
        taken = self._left.copy()
        self._left.clear()
        return taken

    def add(self) -> None:
        """Add what was left to the parameters' gradients."""
        for one in self.take():
            if one.parameter.grad is None:
                one.parameter.grad = torch.zeros_like(one.parameter)
            one.add_to(one.parameter.grad)
            if measures := row_measures.of(one.parameter):
                measures.note_rows(one.parameter.grad, one.latents)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, dim: int, latents: Tensor, dtype: torch.dtype, left: list[RowGradient]
    ) -> Tensor:
        ctx.parameter, ctx.dim, ctx.latents, ctx.left = parameter, dim, latents, left
        return kept_or_own(parameter, dtype).movedim(dim, 0).index_select(0, latents).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.left.append(RowGradient(ctx.parameter, ctx.dim, ctx.latents, grad))
        return None, None, None, None, None

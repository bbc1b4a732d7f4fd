"""Gradients of a few latents' weights, added as rows to those of all latents.

Autograd would spread them out over a matrix of all latents and add that: with 65,536 latents of width 2,304, of which
2,304 have one, 3.6 GB go through memory for 42 MB of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.runtime import row_measures
from trainer.saes.kernels import dead_latents
from trainer.saes.kernels.dead_latents import Weights


class RowGradient(NamedTuple):
    """The gradients of the weights of some latents [n], named once each, or −1 where another rank has the latent.

    `parameters` are W_enc [d_in, d_sae], b_enc [d_sae] and W_dec [d_sae, d_out], `rows` the latents' gradients.
    `centred` [d_in] is the gradient of x − input_bias, summed over tokens; where the bias learns it gets minus that.
    Rows that ranks add up are there once `arrive` returns.
    """

    parameters: Weights
    input_bias: Tensor | None
    latents: Tensor
    rows: Weights
    centred: Tensor | None
    arrive: Callable[[], object] = lambda: None

    def add_to(self, wholes: Weights, input_bias: Tensor | None) -> None:
        """Add them to gradients of the shapes of the parameters."""
        self.arrive()
        by_latent = wholes._replace(W_enc=wholes.W_enc.T)
        dead_latents.add(by_latent, self.latents, self.rows, input_bias, self.centred)


class RowGradients:
    """The gradients of rows that a backward pass has left; whoever calls it calls `add` when it is over."""

    def __init__(self) -> None:
        self._left: list[RowGradient] = []

    def leave(self, gradient: RowGradient) -> None:
        """Keep a gradient until the backward pass is over."""
        self._left.append(gradient)

    def take(self) -> list[RowGradient]:
        """Return what was left since the last call."""
        taken = self._left.copy()
        self._left.clear()
        return taken

    def add(self) -> None:
        """Add what was left to the parameters' gradients."""
        for one in self.take():
            of_bias = None if one.input_bias is None else _gradient(one.input_bias)
            one.add_to(Weights(*map(_gradient, one.parameters)), of_bias)
            for parameter in (one.parameters.W_enc, one.parameters.W_dec):
                if measures := row_measures.of(parameter):
                    measures.note_rows(_gradient(parameter), one.latents)


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad

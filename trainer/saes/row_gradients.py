"""Weight gradients for a few latents, added as rows to the full gradients.

Autograd would first expand these gradients to matrices covering all latents, and then add the matrices. For 2,304 of
65,536 latents of width 2,304, autograd would read and write 3.6 GB to process 42 MB of gradients.
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
    """The weight gradients of n latents.

    `latents` [n] contains the latents' distinct indices, with −1 for latents on other ranks. `parameters` are W_enc
    [d_in, d_sae], b_enc [d_sae] and W_dec [d_sae, d_out]; `rows` are their gradients for the n latents. `centred`
    [d_in] is the gradient of x − input_bias, summed over tokens; a trainable `input_bias` gets the negative of this
    gradient. If the rows are summed over ranks, the sums are complete once `arrive` returns.
    """

    parameters: Weights
    input_bias: Tensor | None
    latents: Tensor
    rows: Weights
    centred: Tensor | None
    arrive: Callable[[], object] = lambda: None

    def add_to(self, wholes: Weights, input_bias: Tensor | None) -> None:
        """Add these gradients to the full gradients, which are shaped like the parameters."""
        self.arrive()
        by_latent = wholes._replace(W_enc=wholes.W_enc.T)
        dead_latents.add(by_latent, self.latents, self.rows, input_bias, self.centred)


class RowGradients:
    """Row gradients collected during a backward pass; call `add` after the pass."""

    def __init__(self) -> None:
        self._left: list[RowGradient] = []

    def leave(self, gradient: RowGradient) -> None:
        """Keep a gradient until the end of the backward pass."""
        self._left.append(gradient)

    def take(self) -> list[RowGradient]:
        """Return the gradients collected since the last call."""
        taken = self._left.copy()
        self._left.clear()
        return taken

    def add(self) -> None:
        """Add the collected gradients to the parameters' gradients."""
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

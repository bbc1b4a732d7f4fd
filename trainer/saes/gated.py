"""Gated SAE (Rajamanoharan et al. 2024, arXiv 2404.16014)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainer.saes.base import Declared, Output, SaeSpec
from trainer.saes.kernels.sparse import decode
from trainer.saes.losses import squared_error
from trainer.saes.penalised import Penalised, Steering
from trainer.saes.sparse_acts import Acts


class Gated(Penalised):
    """An SAE whose encoder has two outputs: the gate decides which latents fire, the magnitude decides how strongly.

    Only the gate is penalised, so that magnitudes do not shrink. The gate learns from a separate reconstruction that
    must not change the decoder. `b_enc` is the gate's bias. The magnitude's encoder columns are the gate's columns
    times exp(`r_mag`).
    """

    traits = Penalised.traits._replace(losses=("mse", "gate_l1", "gate_mse"), encoder_scale=0.6)
    # With twice this `start`, 4 % of latents were dead after 150 steps instead of 1 %.
    steering = Steering(start=0.004, gain=6, integral_gain=0.1)

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__(spec)
        self.declared |= {"r_mag": Declared(0), "b_mag": Declared(0, is_bias=True)}
        self.r_mag = nn.Parameter(torch.zeros(self.d_sae))
        self.b_mag = nn.Parameter(torch.zeros(self.d_sae))

    def forward(self, x: Tensor, y: Tensor) -> Output:
        gate = self.encode_above(x, 0.0)
        acts, opened = self._magnitudes(gate), gate.with_values(gate.values.relu())
        x_hat, errors = self.reconstruct(acts, x, y)
        by_gate = decode(opened, self.W_dec.detach(), self.latents.group) + self.b_dec.detach()
        losses = {
            "mse": errors.square,
            "gate_l1": opened.values.sum(),
            "gate_mse": squared_error(y, by_gate),
        }
        return Output(acts, x_hat, losses, errors.sums)

    def _magnitudes(self, gate: Acts) -> Acts:
        scale = self.r_mag.exp()
        # The gate's values include `b_enc`. Correcting the bias vector is cheaper than correcting every value.
        bias = self.b_mag - self.b_enc * scale
        magnitude = torch.addcmul(gate.at(bias), gate.values, gate.at(scale)).relu()
        return gate.with_values(magnitude * (gate.values > 0))

    @torch.no_grad()
    def _raise_bar(self, bound: Tensor) -> None:
        super()._raise_bar(bound)
        # Make the activation of a latent that just passes the gate as large as it would be without the gate.
        self.b_mag.copy_(self.b_enc)

    def export_config(self) -> dict[str, Any]:
        return {"architecture": "gated"}

    def export_weights(self) -> dict[str, Tensor]:
        weights = super().export_weights()
        return {name: weights[name] for name in ("W_enc", "W_dec", "b_dec")} | {
            "b_gate": weights["b_enc"],
            "b_mag": self.b_mag / self.acts_scale,
            "r_mag": self.r_mag,
        }

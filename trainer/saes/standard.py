"""Standard SAE: ReLU and an L1 penalty weighted by decoder norms.

Bricken et al. 2023, "Towards Monosemanticity"; initial weights as in Anthropic's Circuits Updates of April 2024.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from trainer.saes.base import Output
from trainer.saes.penalised import Penalised, Steering


class Standard(Penalised):
    """An SAE with ReLU latents, penalised by the sum of all activations, each multiplied by its decoder row's norm.

    The norms are unconstrained, since longer rows cannot reduce a penalty that includes the norms.
    """

    traits = Penalised.traits._replace(losses=("mse", "l1"), unit_decoder=False, encoder_scale=1.0)
    # L0 was within 6 % of k after 50 steps; with twice the gain, it oscillated.
    steering = Steering(start=0.005, gain=3, integral_gain=0.1)

    def forward(self, x: Tensor, y: Tensor) -> Output:
        pre_acts = self.encode_above(x, 0.0)
        acts = pre_acts.with_values(pre_acts.values.relu())
        x_hat, errors = self.reconstruct(acts, x, y)
        l1 = acts.total(self.W_dec.norm(dim=1))
        losses = {"mse": errors.square, "l1": l1}
        return Output(acts, x_hat, losses, errors.sums)

    def export_config(self) -> dict[str, Any]:
        return {"architecture": self.saelens_name("standard")}

"""An example of a new architecture: settings, class and, in `ENTRY`, its entry for the registry."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from torch import Tensor

from trainer.contract.settings.architectures import ArchitectureSettings
from trainer.contract.settings.catalog import ArchitectureEntry
from trainer.contract.settings.declare import about
from trainer.saes.base import Output, Sae, Traits
from trainer.saes.kernels.top_k_across_ranks import k_per_token


class LoudestSettings(ArchitectureSettings, frozen=True):
    """Settings of `Loudest`."""

    n_loudest: Annotated[int, about("Latents kept per token.", unit="latents", ge=1)] = 8
    price: Annotated[float, about("Weight of the sum of activations.", ge=0)] = 0.0

    @property
    def n_active(self) -> int:
        return self.n_loudest


class Loudest(Sae):
    """The `n_loudest` largest latents of each token, with an L1 penalty."""

    settings: LoudestSettings
    traits = Traits(losses=("mse", "l1"))

    def forward(self, x: Tensor, y: Tensor) -> Output:
        choose = partial(k_per_token, k=self.settings.n_loudest, group=self.latents.group)
        pre_acts = self.encode(x, choose)
        acts = pre_acts.with_values(pre_acts.values.relu())
        x_hat, errors = self.reconstruct(acts, x, y)
        return Output(acts, x_hat, {"mse": errors.square, "l1": acts.values.sum()}, errors.sums)

    def objective(self, losses: dict[str, Tensor]) -> Tensor:
        return losses["mse"] / self.y_variance + self.settings.price * losses["l1"]

    def export_config(self) -> dict[str, Any]:
        return {"architecture": "topk", "k": self.settings.n_loudest, "rescale_acts_by_decoder_norm": False}


ENTRY = ArchitectureEntry(f"{__name__}:Loudest", "The loudest latents of each token.", LoudestSettings, transcodes="no")

"""Which weights this rank takes the step of: all that it has, or of replicas each its share (ZeRO-1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.parallel.group import Group
from trainer.parallel.latents import Latents
from trainer.saes.base import Sae


class Stepped:
    """All of them: the null form. `parameters` are what the optimizer has, by the names of the SAE's."""

    def __init__(self, sae: Sae) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(sae.named_parameters())
        # Numbers of the latents whose step this rank takes, int64 on their device.
        self.ids = sae.ids

    def begin(self) -> None:
        """Brings weights and gradients to the optimizer."""

    def end(self) -> None:
        """Brings stepped weights back to the SAE."""

    def own(self, latents: Tensor, dim: int) -> Tensor:
        """Of a tensor with the SAE's latents along `dim`: those whose step this rank takes."""
        return latents

    def collected(self, own: Tensor, dim: int) -> Tensor | None:
        """All of the SAE's latents on the first of the replicas; elsewhere None, but where nothing has to be asked."""
        return own


class SteppedShare(Stepped):
    """What each replica has a share of: the latents, and with them all that the optimizer remembers of them.

    Gradients are summed on all replicas as ever; what each has stepped is then given to the others.
    """

    def __init__(self, sae: Sae, replicas: Group) -> None:
        super().__init__(sae)
        self._latents, self._dims = Latents(sae.n_own, replicas), sae.latent_dims()
        self._whole = dict(self.parameters)
        with torch.no_grad():
            for name, dim in self._dims.items():
                if name in self._whole:
                    self.parameters[name] = nn.Parameter(self._latents.part(self._whole[name], dim))
        self.ids = sae.ids[self._latents.own.to(sae.ids.device)]

    @torch.no_grad()
    def begin(self) -> None:
        for name, whole, share in self._pairs():
            share.copy_(self._latents.part(whole, self._dims[name]))
            share.grad = None if whole.grad is None else self._latents.part(whole.grad, self._dims[name])

    @torch.no_grad()
    def end(self) -> None:
        for name, whole, share in self._pairs():
            whole.copy_(self._latents.everywhere(share, self._dims[name]))
            share.grad = None

    def own(self, latents: Tensor, dim: int) -> Tensor:
        return self._latents.part(latents, dim)

    def collected(self, own: Tensor, dim: int) -> Tensor | None:
        return self._latents.collected(own, dim)

    def _pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        return [(name, self._whole[name], self.parameters[name]) for name in self._dims if name in self._whole]

"""Which weights this rank takes the step of: all that it has, or of replicas each its share (ZeRO-1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.parallel.group import Group, part_sizes
from trainer.saes.base import Sae


class Stepped:
    """All of them: the null form. `parameters` are what the optimizer has, by the names of the SAE's; `rows` are the
    latents among the SAE's whose step this rank takes, and `others` the ranks that take that of the rest."""

    others, rows = Group(), slice(None)

    def __init__(self, sae: Sae) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(sae.named_parameters())
        self._whole = {name: one for name, one in self.parameters.items() if name in sae.latent_dims()}
        # Numbers of these latents, int64 on their device.
        self.ids = sae.ids

    def summed(self) -> list[Tensor]:
        """Gradients of latents of which this rank needs the whole sum over the replicas."""
        return [one.grad for one in self._whole.values() if one.grad is not None]

    def dealt(self) -> list[Tensor]:
        """Gradients of which it needs that of its latents only, by rows of latents."""
        return []

    def begin(self) -> None:
        """Bring gradients to the optimizer."""

    def end(self) -> None:
        """Bring stepped weights to the other replicas."""

    def own(self, latents: Tensor, dim: int) -> Tensor:
        """Of a tensor with the SAE's latents along `dim`: those whose step this rank takes."""
        return latents

    def collected(self, own: Tensor, dim: int) -> Tensor | None:
        """All of the SAE's latents on the first of the replicas; elsewhere None, but where nothing has to be asked."""
        return own


class SteppedShare(Stepped):
    """What each replica has a share of: the latents, and with them all that the optimizer remembers of them.

    The parameters are views of the SAE's. What a sum over replicas costs is halved, and what each has stepped takes
    the other half.
    """

    def __init__(self, sae: Sae, replicas: Group) -> None:
        super().__init__(sae)
        self.others = replicas
        self._sizes = part_sizes(sae.n_own, replicas.size)
        begin = sum(self._sizes[: replicas.index])
        self.rows = slice(begin, begin + self._sizes[replicas.index])
        self._dims = {name: sae.latent_dims()[name] for name in self._whole}
        for name, whole in self._whole.items():
            self.parameters[name] = nn.Parameter(self.own(whole.detach(), self._dims[name]))
        self.ids = sae.ids[self.rows]

    def summed(self) -> list[Tensor]:
        return []

    def dealt(self) -> list[Tensor]:
        grads = {name: whole.grad for name, whole in self._whole.items() if whole.grad is not None}
        return [grad.movedim(self._dims[name], 0) for name, grad in grads.items()]

    def begin(self) -> None:
        for name, whole in self._whole.items():
            self.parameters[name].grad = None if whole.grad is None else self.own(whole.grad, self._dims[name])

    @torch.no_grad()
    def end(self) -> None:
        for name in self._whole:
            self.parameters[name].grad = None
        self.others.spread_parts_(whole.movedim(self._dims[name], 0) for name, whole in self._whole.items())

    def own(self, latents: Tensor, dim: int) -> Tensor:
        return latents.movedim(dim, 0)[self.rows].movedim(0, dim)

    def collected(self, own: Tensor, dim: int) -> Tensor | None:
        parts = self.others.collect(own, self._sizes, dim)
        return torch.cat(parts, dim=dim) if parts else None

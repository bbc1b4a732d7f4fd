"""Decides which weights this rank steps: all that it has, or its share where replicas divide the step (ZeRO-1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.parallel.group import Group, part_sizes
from trainer.saes.base import Sae


class Stepped:
    """All weights of the rank are stepped by it: the null form.

    `parameters` are those of the optimizer, by the SAE's names for them; `rows` are the latents among the SAE's whose
    step this rank takes, and `others` the ranks that step the rest.
    """

    others, rows = Group(), slice(None)

    def __init__(self, sae: Sae) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(sae.named_parameters())
        self._whole = {name: one for name, one in self.parameters.items() if name in sae.latent_dims()}
        # Numbers of the latents that this rank steps, int64 on their device.
        self.ids = sae.ids

    def whole_sums(self) -> list[Tensor]:
        """Return the gradients of latents whose sum over the replicas this rank needs as a whole."""
        return [one.grad for one in self._whole.values() if one.grad is not None]

    def part_sums(self) -> list[Tensor]:
        """Return the gradients whose sum it needs for its own latents only; the latents are their first dimension."""
        return []

    def begin(self) -> None:
        """Hand the SAE's gradients to the parameters of the optimizer."""

    def end(self) -> None:
        """Copy the stepped weights to the other replicas."""

    def own(self, latents: Tensor, dim: int) -> Tensor:
        """Return, of a tensor with the SAE's latents along `dim`, those whose step this rank takes."""
        return latents

    def collect(self, own: Tensor, dim: int) -> Tensor | None:
        """Return a tensor with all of the SAE's latents on the first replica, else None; here `own` has them all."""
        return own


class SteppedShare(Stepped):
    """Each replica steps a share of the latents and holds the optimizer's memory of those only.

    The parameters are views of the SAE's. A sum over the replicas costs half as much as before; spreading what each has
    stepped costs the other half.
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

    def whole_sums(self) -> list[Tensor]:
        return []

    def part_sums(self) -> list[Tensor]:
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

    def collect(self, own: Tensor, dim: int) -> Tensor | None:
        parts = self.others.collect(own, self._sizes, dim)
        return torch.cat(parts, dim=dim) if parts else None

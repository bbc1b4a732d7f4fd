"""Decides which weights this rank steps: all that it has, or its share where replicas divide the step (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.parallel.group import Group, own_part, part_sizes
from trainer.runtime import narrow_copy
from trainer.runtime.narrow_copy import NarrowCopy
from trainer.saes.base import Sae

# Matrices that a pass reads last: a transfer of their rows goes on meanwhile.
_READ_LATE = ("W_dec",)


class _Sum(NamedTuple):
    """A gradient [n_latents, n] whose sum over the replicas is under way, and the copy of it that was sent."""

    gradient: Tensor
    sent: Tensor
    transfers: list[Any]


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

    def exchange_narrow(self, dtype: torch.dtype) -> None:
        """Exchange stepped matrices in 16 bits from now on, in which alone passes in training read them."""

    def divide(self) -> None:
        """Prepare for a pass in training: free fp32 weights that only other ranks step."""

    def restore(self, *, fill: bool = True) -> None:
        """Give the SAE all its fp32 weights, with undefined values unless `fill`; all replicas call it together."""

    def send_early(self, *, may: bool) -> None:
        """Let gradients be summed as soon as the next backward pass has them, if they `may`; all replicas say alike."""

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

    Where products read 16 bits only those are spread. The parameters then have memory of their own, and those of the
    SAE have none between the first pass and the next use of fp32 weights: any read of them fails.
    """

    def __init__(
        self, sae: Sae, replicas: Group, as_sent: Callable[[Tensor], Tensor] = lambda gradient: gradient
    ) -> None:
        super().__init__(sae)
        self.others, self._as_sent = replicas, as_sent
        self._sizes = part_sizes(sae.n_own, replicas.size)
        begin = sum(self._sizes[: replicas.index])
        self.rows = slice(begin, begin + self._sizes[replicas.index])
        self._dims = {name: sae.latent_dims()[name] for name in self._whole}
        for name, whole in self._whole.items():
            # `data`, since what torch counts as changes of these weights must not count as changes of all.
            self.parameters[name] = nn.Parameter(self.own(whole.data, self._dims[name]))
        self.ids = sae.ids[self.rows]
        # Copies in 16 bits of the SAE's matrices, and of this rank's rows of them.
        self._narrow: dict[str, tuple[NarrowCopy, NarrowCopy]] = {}
        self._dtype: torch.dtype | None = None
        self._is_divided = False
        # Sums that began within a backward pass, by name.
        self._sums: dict[str, _Sum] = {}
        self._may_send_early = False
        if sae.W_dec.is_cuda and sae.latents.group.size == 1:
            sae.W_dec.register_post_accumulate_grad_hook(partial(self._send, "W_dec"))

    def send_early(self, *, may: bool) -> None:
        self._may_send_early = may

    def _send(self, name: str, whole: Tensor) -> None:
        """Begin the sum of a gradient that is complete, while that of the encoder is computed."""
        if self._may_send_early:
            assert whole.grad is not None
            gradient = whole.grad.movedim(self._dims[name], 0)
            sent = self._as_sent(gradient)
            self._sums[name] = _Sum(gradient, sent, self.others.start_sum_parts([sent]))

    def exchange_narrow(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        for name, whole in self._whole.items():
            if whole.dim() == 2:
                own = self.parameters[name]
                own.data = own.detach().clone()
                self._narrow[name] = narrow_copy.keep(whole), narrow_copy.of(own) or narrow_copy.keep(own)

    @torch.no_grad()
    def divide(self) -> None:
        if self._dtype is None or self._is_divided:
            return
        for name, (copy, own_copy) in self._narrow.items():
            whole, own, dim = self._whole[name], self.parameters[name], self._dims[name]
            own.copy_(self.own(whole, dim))
            # Other ranks may have sent the weights, which torch does not count as a change.
            copy.forget()
            own_copy.be_part(self.own(copy.read(whole, self._dtype), dim), own)
        for name in self._narrow:
            self._whole[name].untyped_storage().resize_(0)
        self._is_divided = True

    @torch.no_grad()
    def restore(self, *, fill: bool = True) -> None:
        if not self._is_divided:
            return
        wholes = []
        for name, (copy, _) in self._narrow.items():
            copy.settle()
            whole = self._whole[name].detach()
            whole.untyped_storage().resize_(whole.numel() * whole.element_size())
            self.own(whole, self._dims[name]).copy_(self.parameters[name])
            wholes.append(whole.movedim(self._dims[name], 0))
        self._is_divided = False
        if fill:
            self.others.spread_parts_(wholes)

    def whole_sums(self) -> list[Tensor]:
        return []

    def part_sums(self) -> list[Tensor]:
        grads = {name: whole.grad for name, whole in self._whole.items() if whole.grad is not None}
        grads = {name: grad for name, grad in grads.items() if name not in self._sums}
        return [grad.movedim(self._dims[name], 0) for name, grad in grads.items()]

    def begin(self) -> None:
        for one in self._sums.values():
            self.others.finish(one.transfers)
            if one.sent is not one.gradient:
                own_part(one.gradient, self.others).copy_(own_part(one.sent, self.others))
        self._sums.clear()
        for name, whole in self._whole.items():
            self.parameters[name].grad = None if whole.grad is None else self.own(whole.grad, self._dims[name])

    @torch.no_grad()
    def end(self) -> None:
        for name in self._whole:
            self.parameters[name].grad = None
        late = [name for name in self._narrow if name in _READ_LATE]
        self.others.spread_parts_(self._stepped_rows(name) for name in self._whole if name not in late)
        for name in late:
            transfers = self.others.start_spread([self._stepped_rows(name)])
            self._narrow[name][0].arrive(partial(self.others.finish, transfers))

    def _stepped_rows(self, name: str) -> Tensor:
        """Return the rows of all ranks of a tensor that is to be spread, of which those of this rank are stepped."""
        whole, dim = self._whole[name], self._dims[name]
        if name in self._narrow:
            assert self._dtype is not None
            copy, own_copy = self._narrow[name]
            # Makes the rows where the step has not written them.
            own_copy.read(self.parameters[name], self._dtype)
            return copy.read(whole, self._dtype).movedim(dim, 0)
        return whole.detach().movedim(dim, 0)

    def own(self, latents: Tensor, dim: int) -> Tensor:
        return latents.movedim(dim, 0)[self.rows].movedim(0, dim)

    def collect(self, own: Tensor, dim: int) -> Tensor | None:
        parts = self.others.collect(own, self._sizes, dim)
        return torch.cat(parts, dim=dim) if parts else None

"""Decides which weights this rank updates: all of its weights, or a part if replicas divide the update (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.parallel.group import Group, local_shard, part_sizes
from trainer.runtime import narrow_copy
from trainer.runtime.narrow_copy import NarrowCopy
from trainer.saes.base import Sae

# A pass reads these matrices late, so the transfer of their rows overlaps with the pass.
_READ_LATE = ("W_dec",)


class _Sum(NamedTuple):
    """A gradient [n_latents, n] being summed over the replicas, and the tensor being sent."""

    gradient: Tensor
    sent: Tensor
    transfers: list[Any]


class Stepped:
    """The weights that this rank updates; this base class does not shard them, so the rank updates all of its weights.

    `parameters` maps names in the SAE to the optimizer's parameters, `rows` selects the latents that this rank updates,
    and `others` is the group of replicas that divide the update.
    """

    others, rows = Group(), slice(None)

    def __init__(self, sae: Sae) -> None:
        self.parameters: dict[str, nn.Parameter] = dict(sae.named_parameters())
        self._whole = {name: one for name, one in self.parameters.items() if name in sae.latent_dims()}
        # The indices of the latents that this rank updates, int64 on the device.
        self.ids = sae.ids

    def whole_sums(self) -> list[Tensor]:
        """Return the gradients whose sums over the replicas this rank needs for all latents."""
        return [one.grad for one in self._whole.values() if one.grad is not None]

    def part_sums(self) -> list[Tensor]:
        """Return the gradients, latents first, whose sums this rank needs only for the latents it updates."""
        return []

    def begin(self) -> None:
        """Assign the SAE's gradients to the optimizer's parameters."""

    def end(self) -> None:
        """Copy the updated weights to the other replicas."""

    def exchange_narrow(self, dtype: torch.dtype) -> None:
        """From now on, exchange updated matrices in the 16-bit type `dtype`, the only type that a pass reads."""

    def divide(self) -> None:
        """Prepare for a training pass: free the fp32 weights that only other ranks update."""

    def restore(self, *, fill: bool = True) -> None:
        """Allocate all of the SAE's fp32 weights and, if `fill`, gather their values; all replicas must call this."""

    def send_early(self, *, may: bool) -> None:
        """If `may`, sum gradients as soon as the next backward pass has computed them.

        All replicas must pass the same value of `may`.
        """

    def own(self, latents: Tensor, dim: int) -> Tensor:
        """Return the part of a tensor, with latents along `dim`, for the latents that this rank updates."""
        return latents

    def collect(self, own: Tensor, dim: int) -> Tensor | None:
        """On the first replica, return the tensor for all latents; on others, None. Here, `own` is that tensor."""
        return own


class SteppedShare(Stepped):
    """Each replica updates a part of the latents, and holds optimizer state only for these latents.

    The optimizer's parameters are views of the SAE's weights. Summing gradient shards (reduce-scatter) costs half of an
    all-reduce; gathering the updated weights costs the other half.

    If matmuls read 16-bit weights, only 16-bit weights are exchanged. The optimizer's parameters then have separate
    memory. The SAE's fp32 matrices have no memory between the first pass and the next `restore`, so any read of them
    fails.
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
            # Use `data`, so that changes to this part do not increment torch's version counter of the full tensor.
            self.parameters[name] = nn.Parameter(self.own(whole.data, self._dims[name]))
        self.ids = sae.ids[self.rows]
        # 16-bit copies of the SAE's matrices, and of this rank's rows.
        self._narrow: dict[str, tuple[NarrowCopy, NarrowCopy]] = {}
        self._dtype: torch.dtype | None = None
        self._is_divided = False
        # The sums started during a backward pass, by parameter name.
        self._sums: dict[str, _Sum] = {}
        self._may_send_early = False
        if sae.W_dec.is_cuda and sae.latents.group.size == 1:
            sae.W_dec.register_post_accumulate_grad_hook(partial(self._send, "W_dec"))

    def send_early(self, *, may: bool) -> None:
        self._may_send_early = may

    def _send(self, name: str, whole: Tensor) -> None:
        """Start summing a complete gradient while the encoder's gradient is still being computed."""
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
            # Weights received from other ranks do not increment torch's version counter.
            copy.forget()
            own_copy.use_view(self.own(copy.read(whole, self._dtype), dim), own)
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
                local_shard(one.gradient, self.others).copy_(local_shard(one.sent, self.others))
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
        """Return the full tensor to gather into, latents first, with this rank's rows already updated."""
        whole, dim = self._whole[name], self._dims[name]
        if name in self._narrow:
            assert self._dtype is not None
            copy, own_copy = self._narrow[name]
            # Convert the rows to 16 bits, unless the optimizer's step has already written them.
            own_copy.read(self.parameters[name], self._dtype)
            return copy.read(whole, self._dtype).movedim(dim, 0)
        return whole.detach().movedim(dim, 0)

    def own(self, latents: Tensor, dim: int) -> Tensor:
        return latents.movedim(dim, 0)[self.rows].movedim(0, dim)

    def collect(self, own: Tensor, dim: int) -> Tensor | None:
        parts = self.others.collect(own, self._sizes, dim)
        return torch.cat(parts, dim=dim) if parts else None

"""What an optimizer offers beside torch's own interface."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Now(NamedTuple):
    """The settings of one step, 0-dim tensors on the device; where `skips` (bool) is true it changes nothing."""

    lr: Tensor
    grad_scale: Tensor | None
    skips: Tensor

    def gradient(self, grad: Tensor) -> Tensor:
        """Return a scaled copy of a gradient; 0 where the step is skipped, since it is computed all the same."""
        scaled = grad if self.grad_scale is None else grad / self.grad_scale
        return torch.where(self.skips, 0, scaled)


def rate_of(group: dict[str, Any], like: Tensor) -> Tensor:
    """Return a group's learning rate, 0-dim on the device of `like`."""
    rate = group["lr"]
    # Filled on the device: a copy from the host would wait, and a number compiled into a kernel would not change.
    return rate if isinstance(rate, Tensor) else like.new_full((), rate)


class LatentAxis(NamedTuple):
    """Along which dimension of a parameter the latents lie, and their numbers in the SAE, int64 on its device."""

    dim: int
    ids: Tensor


class Follower(NamedTuple):
    """A parameter that goes `share` of the way of another, transposed, beside its own steps."""

    parameter: nn.Parameter
    share: float


class Squares(NamedTuple):
    """Σ‖g‖² of the gradients of latents and of those that are of all latents alike, fp64, 0-dim."""

    of_latents: Tensor
    of_all: Tensor


class RowStep(ABC):
    """Steps matrices, each latent's weights in one pass, and vectors, where an optimizer can do so.

    It takes the part of a gradient along a row of length 1 out, and scales the row back: what the caller of `step` does
    otherwise. Followers go with what they follow.
    """

    @abstractmethod
    def let_sums_be_measured(self) -> None:
        """Let whoever sums up a gradient measure it; nobody may add to it where torch does not see it."""

    @abstractmethod
    def measure(self) -> Squares:
        """Return the squares of what it steps; of rows of length 1 only what lies across them."""

    @abstractmethod
    def step(self, taken: Tensor) -> None:
        """Step what was measured, and leave no gradient of it, so that the optimizer's own `step` passes over it.

        `taken` (fp32, 0-dim) is 1 unless the step is skipped.
        """

    @abstractmethod
    def steps(self, parameter: nn.Parameter) -> bool:
        """Tell whether it steps a parameter."""


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer whose whole state is tensors in `state[parameter]`, which is what a checkpoint holds.

    `found_inf` (0-dim float, on the device) is set before `step` and makes it change nothing where it is 1, so that
    the host need not know whether a gradient was finite. `grad_scale` (likewise, or None for 1) is what gradients
    are divided by on their way: loss scale and clipping need no pass of their own. torch's fused optimizers know
    both attributes too. What a step leaves in the gradients is not defined.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    # Matrices whose rows the caller of `step` scales back to length 1 after every step.
    unit_rows: tuple[nn.Parameter, ...] = ()
    # Where the latents of a parameter are; those without any are left out.
    latent_axes: Mapping[nn.Parameter, LatentAxis] = MappingProxyType({})
    # Parameters that go with another, by that other: with `by_rows` alone, else the caller of `step` moves them.
    followers: Mapping[nn.Parameter, Follower] = MappingProxyType({})
    # With a schedule of its own, the learning rate is not decayed at the end.
    is_schedule_free = False

    # As torch 2.6 to 2.13 wrap them they load its compiler, for which a rank that does not compile waits two seconds.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def by_rows(self) -> RowStep | None:
        """Return what steps matrices in one pass, where there is anything that does; the attributes above are set."""
        return None

    def adopted(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's state of a parameter in the types that this optimizer keeps."""
        return state

    def use_trained_weights(self) -> None:
        """Put the weights to evaluate and save into the parameters, where they differ from those that are stepped."""

    def use_stepped_weights(self) -> None:
        """Undo `use_trained_weights`."""

    @torch.no_grad()
    def forget(self, latents: Tensor) -> None:
        """Clear what is remembered of some latents (bool [d_sae]), whose weights were replaced."""
        for parameter, (dim, _) in self.latent_axes.items():
            for remembered in self.state[parameter].values():
                if remembered.shape == parameter.shape:
                    remembered.movedim(dim, -1).masked_fill_(latents, 0)

    def with_group(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """Yield all parameters, each with the settings of its group."""
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def with_gradient(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, Tensor]]:
        """Yield the parameters that take part in this step, each with its group's settings and its gradient."""
        for group, parameter in self.with_group():
            if parameter.grad is not None:
                yield group, parameter, parameter.grad

    def now(self, group: dict[str, Any], like: Tensor) -> Now:
        """Return this step's rate, scale and whether it is skipped, on the device of `like`."""
        skips = like.new_zeros((), dtype=torch.bool) if self.found_inf is None else self.found_inf > 0
        return Now(rate_of(group, like), self.grad_scale, skips)

"""The optimizer interface, an extension of torch's."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Now(NamedTuple):
    """The settings for one step, as 0-dim tensors on the device; if `skips` (bool) is true, the step has no effect."""

    lr: Tensor
    grad_scale: Tensor | None
    skips: Tensor

    def gradient(self, grad: Tensor) -> Tensor:
        """Return a scaled copy of a gradient, or zeros if the step is skipped, since skipped steps are computed too."""
        scaled = grad if self.grad_scale is None else grad / self.grad_scale
        return torch.where(self.skips, 0, scaled)


def rate_of(group: dict[str, Any], like: Tensor) -> Tensor:
    """Return a group's learning rate, 0-dim on the device of `like`."""
    rate = group["lr"]
    # Create the rate on the device: a copy from the host would block, and a float would be compiled in as a constant.
    return rate if isinstance(rate, Tensor) else like.new_full((), rate)


class LatentAxis(NamedTuple):
    """The dimension of a parameter that indexes latents, and the latents' indices in the SAE (int64, same device)."""

    dim: int
    ids: Tensor


class TiedParameter(NamedTuple):
    """A parameter that adds `share` times another parameter's transposed update to its own update."""

    parameter: nn.Parameter
    share: float


class RowStep(ABC):
    """An optimizer step that updates a matrix in one pass over each latent's weights; it also updates vectors.

    If rows have unit norm, the step first removes the gradient component along each row, and finally normalises the
    row. If the optimizer has no `RowStep`, the caller of `step` projects the gradients and normalises the rows.
    Followers are updated in the same pass as their leaders.
    """

    @abstractmethod
    def allow_fused_norms(self) -> None:
        """Allow the kernels that sum a gradient over tokens to measure its row norms in the same pass.

        Later changes to the gradient must go through torch, whose version counter detects them.
        """

    @abstractmethod
    def measure_latents(self) -> Tensor:
        """Return Σ‖g‖² over the per-latent weights (fp64, 0-dim), for unit-norm rows without the parallel component."""

    @abstractmethod
    def measure_shared(self) -> Tensor:
        """Return Σ‖g‖² over the weights that all latents share, fp64, 0-dim."""

    @abstractmethod
    def step(self, taken: Tensor) -> None:
        """Update the measured parameters and set their gradients to None, so that the optimizer's `step` ignores them.

        `taken` (fp32, 0-dim) is 0 if the step is skipped, otherwise 1.
        """

    @abstractmethod
    def steps(self, parameter: nn.Parameter) -> bool:
        """Return whether this object updates the parameter."""


class Optimizer(torch.optim.Optimizer):
    """A torch optimizer that keeps its entire state as tensors in `state[parameter]`, so that checkpoints can store it.

    `found_inf` (0-dim float on the device) is set before `step`. If `found_inf` is 1, the step has no effect, so the
    host does not have to know whether all gradients were finite. The step divides gradients by `grad_scale` (0-dim
    float on the device; None means 1), so loss scaling and clipping need no extra pass. torch's fused optimizers have
    the same two attributes. Gradient values are undefined after a step.
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    # Matrices whose rows the caller of `step` scales to unit norm after every step.
    unit_rows: tuple[nn.Parameter, ...] = ()
    # The latent axis of each parameter that has one.
    latent_axes: Mapping[nn.Parameter, LatentAxis] = MappingProxyType({})
    # The follower of each leading parameter. The `by_rows` step updates the followers; without such a step, the caller
    # of `step` updates them.
    followers: Mapping[nn.Parameter, TiedParameter] = MappingProxyType({})
    # If True, the learning rate is not decayed at the end of training.
    is_schedule_free = False

    # In torch 2.6 to 2.13, the wrappers around these methods import the compiler, which takes two seconds on every
    # rank.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)

    def by_rows(self) -> RowStep | None:
        """Return the one-pass step for matrices, or None; set the attributes above before the call."""
        return None

    def adopted(self, parameter: nn.Parameter, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a parameter's checkpoint state to this optimizer's dtypes."""
        return state

    def use_trained_weights(self) -> None:
        """Load the weights for evaluation and saving into the parameters, if training steps use other weights."""

    def use_stepped_weights(self) -> None:
        """Undo `use_trained_weights`."""

    @torch.no_grad()
    def forget(self, latents: Tensor) -> None:
        """Clear the state of latents whose weights were replaced; `latents` is a mask, bool [d_sae]."""
        for parameter, (dim, _) in self.latent_axes.items():
            for remembered in self.state[parameter].values():
                if remembered.shape == parameter.shape:
                    remembered.movedim(dim, -1).masked_fill_(latents, 0)

    def with_group(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        """Yield all parameters, each with its group's settings."""
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def with_gradient(self) -> Iterator[tuple[dict[str, Any], nn.Parameter, Tensor]]:
        """Yield the parameters with a gradient, each with its group's settings and the gradient."""
        for group, parameter in self.with_group():
            if parameter.grad is not None:
                yield group, parameter, parameter.grad

    def now(self, group: dict[str, Any], like: Tensor) -> Now:
        """Return the learning rate, gradient scale and skip flag for this step, on the device of `like`."""
        skips = like.new_zeros((), dtype=torch.bool) if self.found_inf is None else self.found_inf > 0
        return Now(rate_of(group, like), self.grad_scale, skips)

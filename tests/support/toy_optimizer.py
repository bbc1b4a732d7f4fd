"""An example of a new optimizer in one file; `ENTRY` is its entry for the registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated

import torch
from torch import nn

from trainer.contract.settings.catalog import OptimizerEntry
from trainer.contract.settings.declare import about
from trainer.contract.settings.optimizers import OptimizerSettings
from trainer.optimizers.base import Optimizer


class HeavyBallSettings(OptimizerSettings, frozen=True):
    """Gradient descent with momentum (Polyak 1964)."""

    heaviness: Annotated[float, about("Decay of the running sum of gradients.", ge=0, lt=1)] = 0.9

    def auto_lr(self, d_sae: int) -> float:
        return 0.3


class HeavyBall(Optimizer):
    """Gradient descent with momentum."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, *, heaviness: float) -> None:
        super().__init__(parameters, {"lr": lr, "heaviness": heaviness})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group, parameter, grad in self.with_gradient():
            state, now = self.state[parameter], self.now(group, parameter)
            if not state:
                state["speed"] = torch.zeros_like(parameter)
            state["speed"].mul_(torch.where(now.skips, 1.0, group["heaviness"])).add_(now.gradient(grad))
            parameter.sub_(now.lr * ~now.skips * state["speed"])


ENTRY = OptimizerEntry(f"{__name__}:HeavyBall", "Gradient descent with momentum.", HeavyBallSettings, state_values=1)

"""The weight update of an SAE: gradient projection, optimizer step, normalisation and constraints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from torch import Tensor

from trainer.optimizers.base import Optimizer, RowStep, Squares
from trainer.parallel.group import dense
from trainer.saes.base import Sae
from trainer.training.following import Following
from trainer.training.gradients import GradientCheck, total_square
from trainer.training.zero_shards import Stepped


class Update:
    """Updates entire matrices in separate passes: used on a CPU and for optimizers without a row-wise step."""

    def __init__(self, sae: Sae, stepped: Stepped, optimizer: Optimizer, following: Following | None) -> None:
        self._sae, self._stepped, self._optimizer, self._following = sae, stepped, optimizer, following

    def measure(self) -> Squares:
        """Project the gradients for the step, and return their squared norms."""
        self._sae.project_gradient(self._stepped.rows)
        return self._squares(self._stepped.parameters)

    def take(self, check: GradientCheck) -> None:
        """Step the weights and apply their constraints; if the check is to skip, change nothing."""
        skips = check.skips
        with self._following.apart(skips) if self._following else contextlib.nullcontext():
            self._optimizer.step()
            self._sae.normalise_decoder(skips, self._stepped.rows)
        self._sae.constrain(self._stepped.rows)

    def _squares(self, names: Iterable[str]) -> Squares:
        """Return the squared norms of the gradients of the named parameters."""
        dims, device = self._sae.latent_dims(), self._sae.W_dec.device
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        for name in names:
            grad = self._stepped.parameters[name].grad
            if grad is not None:
                parts[name in dims].append(dense(grad))
        return Squares(total_square(parts[True], device), total_square(parts[False], device))


class RowUpdate(Update):
    """Steps matrices and vectors one latent at a time, so that each weight is read and written once.

    The optimizer steps the remaining parameters, such as a skip connection.
    """

    def __init__(self, sae: Sae, stepped: Stepped, optimizer: Optimizer, by_rows: RowStep) -> None:
        super().__init__(sae, stepped, optimizer, None)
        self._by_rows = by_rows
        self._others = [name for name, one in stepped.parameters.items() if not by_rows.steps(one)]

    def measure(self) -> Squares:
        by_rows = self._by_rows.measure()
        if not self._others:
            return by_rows
        others = self._squares(self._others)
        return Squares(by_rows.of_latents + others.of_latents, by_rows.of_all + others.of_all)

    def take(self, check: GradientCheck) -> None:
        self._by_rows.step(check.taken)
        self._optimizer.step()
        self._sae.constrain(self._stepped.rows)

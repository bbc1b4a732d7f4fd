"""The step of an SAE's weights, with all that it does to them and their gradients before and after."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from torch import Tensor

from trainer.optimizers.base import Optimizer, RowStep
from trainer.parallel.group import dense
from trainer.saes.base import Sae
from trainer.training.following import Following
from trainer.training.gradients import total_square
from trainer.training.zero_shards import Stepped


class Squares(NamedTuple):
    """Σ‖g‖² of the gradients of latents and of those that are of all latents alike, fp64, 0-dim."""

    of_latents: Tensor
    of_all: Tensor


class Update:
    """Passes over whole matrices, one after the other: on a CPU, and for optimizers that know no other way."""

    def __init__(self, sae: Sae, stepped: Stepped, optimizer: Optimizer, following: Following | None) -> None:
        self._sae, self._stepped, self._optimizer, self._following = sae, stepped, optimizer, following

    def measure(self) -> Squares:
        """Take out of the gradients what the step must not see, and return the squares of what is left."""
        self._sae.project_gradient(self._stepped.rows)
        return self._squares()

    def take(self, skips: Tensor) -> None:
        """Step the weights and bring them into their range; where `skips` (0-dim bool), change no bit."""
        with self._following.apart(skips) if self._following else contextlib.nullcontext():
            self._optimizer.step()
            self._sae.normalise_decoder(skips, self._stepped.rows)
        self._sae.constrain(self._stepped.rows)

    def _squares(self, by_rows: RowStep | None = None) -> Squares:
        """Return the squares of all gradients but those that are measured `by_rows`."""
        dims, device = self._sae.latent_dims(), self._sae.W_dec.device
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in self._stepped.parameters.items():
            if parameter.grad is not None and not (by_rows and by_rows.steps(parameter)):
                parts[name in dims].append(dense(parameter.grad))
        return Squares(total_square(parts[True], device), total_square(parts[False], device))


class RowUpdate(Update):
    """The matrices are stepped a latent at a time, so that each of their weights is read and written once."""

    def __init__(self, sae: Sae, stepped: Stepped, optimizer: Optimizer, by_rows: RowStep) -> None:
        super().__init__(sae, stepped, optimizer, None)
        self._by_rows = by_rows

    def measure(self) -> Squares:
        of_matrices, others = self._by_rows.measure(), self._squares(self._by_rows)
        return others._replace(of_latents=others.of_latents + of_matrices)

    def take(self, skips: Tensor) -> None:
        self._by_rows.step()
        self._optimizer.step()
        self._sae.constrain(self._stepped.rows)

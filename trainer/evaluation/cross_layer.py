"""Runs the layers of a cross-layer transcoder in the units of raw rows.

The reconstruction of a layer's target needs the latents of this layer and of all earlier layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.runs.report_card import LayerFigures
from trainer.evaluation.exported import ExportedSae, read_exported
from trainer.evaluation.figures import Reconstruct
from trainer.saes.layer import Layer
from trainer.saes.sparse_acts import Acts, DenseActs
from trainer.sharing.base import layer_of_metadata


class ExportedLayers:
    """The first `layers` of a cross-layer transcoder's `n_layers`, in order, which run on raw rows in fp32."""

    def __init__(self, layers: Sequence[ExportedSae], n_layers: int | None = None) -> None:
        self.layers, self.n_layers = layers, n_layers or len(layers)

    def reconstruct(self, number: int, x: Tensor, y: Tensor | None = None) -> tuple[DenseActs, Tensor]:
        """Return the activations of layer `number` and the reconstruction of its target [n, d_out].

        `x` [n, n_layers * d_in] is joined from the rows of all layers; `y` is ignored.
        """
        before: Tensor | None = None
        for layer in range(number + 1):
            acts, own, before = self.run(layer, x.tensor_split(self.n_layers, dim=1)[layer], before)
        return acts, own

    def run(self, number: int, x: Tensor, before: Tensor | None) -> tuple[DenseActs, Tensor, Tensor]:
        """Run layer `number` on its rows x [n, d_in].

        `before` [n, n_targets * d_out] is what the earlier layers write to this layer's target and to the later ones;
        it is None for the first layer. Return the activations, the reconstruction of the layer's target [n, d_out], and
        what all layers so far write to the later targets.
        """
        layer = self.layers[number]
        acts = layer.encode(x)
        written = acts.values @ layer.W_dec
        written = written if before is None else written + before
        d_out = layer.W_dec.shape[1] // (self.n_layers - number)
        return acts, written[:, :d_out] + layer.b_dec[:d_out], written[:, d_out:]

    def in_turn(self) -> list[Reconstruct]:
        """Return a function for each layer that reconstructs its target from its rows [n, d_in].

        The functions must be called for the same rows in the order of the layers, as a language model does.
        """
        before: Tensor | None = None

        def reconstruct(number: int, x: Tensor, _: Tensor) -> tuple[Acts, Tensor]:
            nonlocal before
            acts, x_hat, before = self.run(number, x, before if number else None)
            return acts, x_hat

        return [partial(reconstruct, number) for number in range(len(self.layers))]

    @contextlib.contextmanager
    def measuring_half(self, half: int) -> Iterator[None]:
        """In the `with` block, all layers use their thresholds for one half of the held-out rows."""
        with contextlib.ExitStack() as stack:
            for layer in self.layers:
                stack.enter_context(layer.measuring_half(half))
            yield


class LayerSae:
    """One layer of a cross-layer transcoder, measured on the joined rows of all layers."""

    def __init__(self, layers: ExportedLayers, number: int) -> None:
        self._all, self._number, self.own = layers, number, layers.layers[number]
        self.dimension_scales = None
        # Σ‖·‖² over all rows of what earlier layers and the layer's own latents write to its target.
        self._squares = torch.zeros(2, dtype=torch.float64)
        # The width of the layer's own target.
        self.d_out = self.own.W_dec.shape[1] // (layers.n_layers - number)

    def reconstruct(self, x: Tensor, y: Tensor | None = None) -> tuple[DenseActs, Tensor]:
        """Return the activations, and the reconstruction [n, d_out] of the target, for joined rows; `y` is ignored."""
        acts, x_hat = self._all.reconstruct(self._number, x)
        own = acts.values @ self.own.W_dec[:, : self.d_out]
        parts = x_hat - self.own.b_dec[: self.d_out] - own, own
        self._squares += torch.stack([one.double().square().sum() for one in parts]).cpu()
        return acts, x_hat

    @property
    def figures(self) -> LayerFigures:
        """The layer's place, and the share that earlier layers write, over all rows reconstructed so far."""
        total = float(self._squares.sum())
        # Without earlier layers, the first sum is only rounding errors.
        share = float(self._squares[0]) / total if self._number and total else 0.0
        return LayerFigures(self._number, self._all.n_layers, share)

    @contextlib.contextmanager
    def measuring_half(self, half: int) -> Iterator[None]:
        """In the `with` block, use the thresholds for one half of the held-out rows."""
        with self._all.measuring_half(half):
            yield


class StoredLayers:
    """The layers in a run's folders, in order; each is read when it is first needed."""

    def __init__(self, folders: Mapping[str, Path], device: torch.device) -> None:
        self._folders, self._device = [*folders.values()], device
        self._read: list[ExportedSae] = []

    def upto(self, number: int) -> ExportedLayers:
        """Return the layers up to `number`; raise `UserError` if one is missing or belongs elsewhere."""
        n_layers = len(self._folders)
        for at, folder in enumerate(self._folders[len(self._read) : number + 1], start=len(self._read)):
            layer = read_exported(folder, self._device)
            if layer_of_metadata(layer.metadata) != Layer(at, n_layers):
                raise UserError(f"{folder}: is not layer {at} of a cross-layer transcoder of {n_layers} layers")
            self._read.append(layer)
        return ExportedLayers(self._read[: number + 1], n_layers)

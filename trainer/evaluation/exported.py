"""Loads an exported SAE in any supported format, and runs it on rows."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from trainer.activations.training_data import HALVES
from trainer.contract.runs.card_versions import KS
from trainer.evaluation.figures import Levels, Refinement
from trainer.saes.kernels.sparse import decode
from trainer.saes.refinement import refined
from trainer.saes.sparse_acts import Acts, DenseActs
from trainer.sharing.base import NOTHING_GIVEN, OF_RANKED, Given, SharedSae, scales_in
from trainer.sharing.finding import in_folder
from trainer.training.thresholds import OF_HALVES

# The maximum number of k values to measure.
_MOST_KS = 16


class ExportedSae:
    """An SAE that runs on raw rows in fp32; `tokens` is the number of tokens it was trained on."""

    def __init__(self, shared: SharedSae, device: torch.device) -> None:
        self.metadata, self.parts = shared.metadata, shared.parts
        self.architecture = shared.trained_as or shared.architecture
        self.d_in, self.d_sae = shared.d_in, shared.d_sae
        self._form = shared.form
        self.is_transcoder, self._k = shared.is_transcoder, shared.k
        self._weights = {name: tensor.to(device) for name, tensor in shared.weights.items()}
        self.W_dec, self.b_dec = self._weights["W_dec"], self._weights["b_dec"]
        scales = scales_in(shared.metadata, shared.d_out)
        # The dimension scales [d_out] used in training, or None if all are 1.
        self.dimension_scales = None if scales is None else scales.to(device)
        self._of_halves = _thresholds_in(shared.metadata)

    @contextlib.contextmanager
    def measuring_half(self, half: int) -> Iterator[None]:
        """In the `with` block, use the threshold for one half of the held-out rows, which was set on the other half."""
        whole = self._weights.get("threshold")
        if whole is not None and self._of_halves:
            # With rank norms, the thresholds differ by latent, but all by the same factor between the halves.
            ranked = self.metadata.get(OF_RANKED)
            one = whole / ranked if isinstance(ranked, int | float) and ranked > 0 else torch.ones_like(whole)
            self._weights["threshold"] = one * self._of_halves[half]
        try:
            yield
        finally:
            if whole is not None:
                self._weights["threshold"] = whole

    @property
    def tokens(self) -> int:
        tokens = self.metadata.get("training_tokens")
        return tokens if isinstance(tokens, int) else 0

    @property
    def directions(self) -> Tensor:
        """The decoder's rows [d_sae, d_out], multiplied by the dimension scales used in training."""
        return self.W_dec if self.dimension_scales is None else self.W_dec * self.dimension_scales

    @property
    def encoder_directions(self) -> Tensor:
        """The encoder's columns, as rows [d_sae, d_in]."""
        return self._weights["W_enc"].T

    @property
    def levels(self) -> Levels | None:
        return Levels(self.ks, self.reconstruct_with_each_k) if self.ks else None

    @property
    def ks(self) -> list[int]:
        """The values of k, up to its own, that the SAE is trained for, ascending; [] for most SAEs."""
        stated, k = self.metadata.get(KS), self._k or 0
        if self._form != "topk" or not isinstance(stated, list):
            return []
        # The metadata may come from another person, and each k takes a pass over the rows.
        smaller = sorted({one for one in stated if type(one) is int and 0 < one < k})
        return [*smaller[: _MOST_KS - 1], k]

    def reconstruct(self, x: Tensor, y: Tensor | None = None) -> tuple[DenseActs, Tensor]:
        """Return the activations and the reconstruction [n, d_out] for rows x [n, d_in]; `y` is ignored."""
        acts = self.encode(x)
        return acts, acts.values @ self.W_dec + self._offset(x)

    def reconstruct_with_each_k(self, x: Tensor, y: Tensor | None = None) -> tuple[DenseActs, list[Tensor]]:
        """Return the activations of a TopK SAE, and the reconstruction with each of `ks`; `y` is ignored.

        The rows are encoded and sorted once, and each reconstruction adds latents to the one before.
        """
        pre_acts = self._product(x) + self._weights["b_enc"]
        values, latents = self._largest(pre_acts)
        x_hats, x_hat = [], self._offset(x).expand(len(x), -1)
        for first, last in itertools.pairwise([0, *self.ks]):
            some = latents[:, first:last]
            x_hat = x_hat + embedding_bag(some, self.W_dec, per_sample_weights=values[:, first:last], mode="sum")
            x_hats.append(x_hat)
        return _filled(pre_acts, values, latents), x_hats

    def refinement(self, n_steps: int) -> Refinement | None:
        """Return the refinement in `n_steps` steps, or None for 0 steps."""

        def refine(x: Tensor, acts: Acts) -> tuple[Acts, Tensor]:
            better = refined(x - self.b_dec, acts, self.W_dec, n_steps)
            return better, decode(better, self.W_dec) + self.b_dec

        return Refinement(n_steps, refine) if n_steps else None

    def _offset(self, x: Tensor) -> Tensor:
        return self.b_dec + x @ self._weights["W_skip"].T if "W_skip" in self._weights else self.b_dec

    def encode(self, x: Tensor) -> DenseActs:
        """Return the latent activations [n, d_sae] for rows [n, d_in]."""
        own = self._weights
        product = self._product(x)
        if self._form == "gated":
            return DenseActs((product * own["r_mag"].exp() + own["b_mag"]).relu() * (product + own["b_gate"] > 0))
        pre_acts = product + own["b_enc"]
        if self._form == "topk":
            return _filled(pre_acts, *self._largest(pre_acts))
        if self._form == "jumprelu":
            return DenseActs(pre_acts.relu() * (pre_acts > own["threshold"]))
        return DenseActs(pre_acts.relu())

    def _product(self, x: Tensor) -> Tensor:
        return (x if self.is_transcoder else x - self.b_dec) @ self._weights["W_enc"]

    def _largest(self, pre_acts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the k largest activations of each row, the largest first, and their latents; both are [n, k]."""
        assert self._k is not None
        values, latents = pre_acts.topk(self._k, dim=1)
        return values.relu(), latents


def _filled(pre_acts: Tensor, values: Tensor, latents: Tensor) -> DenseActs:
    """Return the activations `values` of the `latents`, both [n, k], in a matrix of the size of `pre_acts`."""
    return DenseActs(torch.zeros_like(pre_acts).scatter(1, latents, values))


def _thresholds_in(metadata: Mapping[str, Any]) -> list[float]:
    """Return the threshold for each half of the held-out rows, or [] if the metadata has no valid thresholds."""
    stated = metadata.get(OF_HALVES)
    if not isinstance(stated, list) or len(stated) != len(HALVES):
        return []
    are_numbers = all(type(one) in (int, float) and 0 <= one < torch.finfo(torch.float32).max for one in stated)
    return [float(one) for one in stated] if are_numbers else []


def read_exported(folder: Path, device: torch.device, given: Given = NOTHING_GIVEN) -> ExportedSae:
    """Read the SAE in a folder; raise `UserError` if it is missing or its architecture is not supported."""
    return ExportedSae(in_folder(folder).read(given), device)

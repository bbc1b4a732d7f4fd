"""Loads an exported SAE in any supported format, and runs it on rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.activations.training_data import HALVES
from trainer.contract.runs.card_versions import KS
from trainer.saes.sparse_acts import DenseActs
from trainer.sharing.base import NOTHING_GIVEN, Given, SharedSae, scales_in
from trainer.sharing.finding import in_folder
from trainer.training.thresholds import OF_HALVES

# The maximum number of k values to measure.
_MOST_KS = 16


class ExportedSae:
    """An SAE that runs on raw rows in fp32; `tokens` is the number of tokens it was trained on."""

    def __init__(self, shared: SharedSae, device: torch.device) -> None:
        self.metadata = shared.metadata
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
            self._weights["threshold"] = torch.full_like(whole, self._of_halves[half])
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
    def ks(self) -> list[int]:
        """The values of k, up to its own, that the SAE is trained for, ascending; [] for most SAEs."""
        stated, k = self.metadata.get(KS), self._k or 0
        if self._form != "topk" or not isinstance(stated, list):
            return []
        # The metadata may come from another person, and each k takes a pass over the rows.
        smaller = sorted({one for one in stated if type(one) is int and 0 < one < k})
        return [*smaller[: _MOST_KS - 1], k]

    def reconstruct(self, x: Tensor, y: Tensor | None = None, k: int | None = None) -> tuple[DenseActs, Tensor]:
        """Return the activations and the reconstruction [n, d_out] for rows x [n, d_in]; `y` is ignored.

        `k` replaces a TopK SAE's own k.
        """
        acts = self.encode(x, k)
        x_hat = acts.values @ self.W_dec + self.b_dec
        return acts, x_hat + x @ self._weights["W_skip"].T if "W_skip" in self._weights else x_hat

    def encode(self, x: Tensor, k: int | None = None) -> DenseActs:
        """Return the latent activations [n, d_sae] for rows [n, d_in]; `k` replaces a TopK SAE's own k."""
        own = self._weights
        product = (x if self.is_transcoder else x - self.b_dec) @ own["W_enc"]
        if self._form == "gated":
            return DenseActs((product * own["r_mag"].exp() + own["b_mag"]).relu() * (product + own["b_gate"] > 0))
        pre_acts = product + own["b_enc"]
        if self._form == "jumprelu":
            return DenseActs(pre_acts.relu() * (pre_acts > own["threshold"]))
        if self._form == "topk":
            k = k or self._k
            assert k is not None
            largest = pre_acts.topk(k, dim=1)
            return DenseActs(torch.zeros_like(pre_acts).scatter(1, largest.indices, largest.values.relu()))
        return DenseActs(pre_acts.relu())


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

"""An SAE as its files have it, in SAELens' format: `sae_weights.safetensors` and `cfg.json` in one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json
from trainer.saes.sparse_acts import DenseActs
from trainer.sharing.saelens import CONFIG, WEIGHTS

# What SAEs of each architecture have besides W_enc [d_in, d_sae], W_dec [d_sae, d_out] and b_dec [d_out]: all [d_sae].
_MORE = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
# Ways of SAELens in which activations could be changed on their way in and out, and what they are where nothing is.
_PLAIN = {"normalize_activations": "none", "reshape_activations": "none", "rescale_acts_by_decoder_norm": False}


class ExportedSae:
    """An SAE to run on raw rows, fp32; `architecture` and `tokens` are what it was trained as, and on how many."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.form = _form(config)
        self._config, self._tensors = config, tensors
        self.W_dec, self._b_dec = tensors["W_dec"], tensors["b_dec"]
        self.d_in, self.d_sae = tensors["W_enc"].shape
        self.is_transcoder = str(config["architecture"]).endswith("transcoder")
        self._k = int(config.get("k", 0))

    @property
    def metadata(self) -> dict[str, Any]:
        metadata = self._config.get("metadata")
        return metadata if isinstance(metadata, dict) else {}

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("training_architecture") or self._config["architecture"])

    @property
    def tokens(self) -> int:
        tokens = self.metadata.get("training_tokens")
        return tokens if isinstance(tokens, int) else 0

    def reconstruct(self, x: Tensor, y: Tensor | None = None) -> tuple[DenseActs, Tensor]:
        """Return the activations and the reconstruction [n, d_out] of rows x [n, d_in]; `y` is not looked at."""
        acts = self.encode(x)
        return acts, acts.values @ self.W_dec + self._b_dec

    def encode(self, x: Tensor) -> DenseActs:
        """Return the activations [n, d_sae] of rows [n, d_in]."""
        own, offset = self._tensors, self._config.get("apply_b_dec_to_input", not self.is_transcoder)
        product = (x - self._b_dec if offset else x) @ own["W_enc"]
        if self.form == "gated":
            return DenseActs((product * own["r_mag"].exp() + own["b_mag"]).relu() * (product + own["b_gate"] > 0))
        pre_acts = product + own["b_enc"]
        if self.form == "jumprelu":
            return DenseActs(pre_acts.relu() * (pre_acts > own["threshold"]))
        if self.form == "topk":
            largest = pre_acts.topk(min(self._k, self.d_sae), dim=1)
            return DenseActs(torch.zeros_like(pre_acts).scatter(1, largest.indices, largest.values.relu()))
        return DenseActs(pre_acts.relu())


def is_exported(folder: Path) -> bool:
    """Tell whether a folder holds an SAE in this format."""
    return (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def read_exported(folder: Path, device: torch.device) -> ExportedSae:
    """Read an SAE; raise `UserError` where its files are damaged, or of a kind that is not known here."""
    config = read_json(folder / CONFIG, dict[str, Any])
    if config is None:
        raise UserError(f"{folder / CONFIG} cannot be read; export the SAE again")
    names = ("W_enc", "W_dec", "b_dec", *_MORE[_form(config)])
    try:
        stored = load_file(folder / WEIGHTS, device=str(device))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read ({error}); export the SAE again") from None
    tensors = {name: stored[name].float() for name in names if name in stored}
    if not _fit(tensors, names):
        raise UserError(f"{folder / WEIGHTS} does not hold the {config['architecture']} SAE of its {CONFIG}")
    return ExportedSae(config, tensors)


def _form(config: dict[str, Any]) -> str:
    """Return how latents are made sparse; raise `UserError` for what is not known here."""
    architecture = str(config.get("architecture"))
    form = "standard" if architecture == "transcoder" else architecture.removesuffix("_transcoder")
    if form not in _MORE:
        raise UserError(
            f'{CONFIG}: architecture "{architecture}" is not one of {", ".join(_MORE)} and their transcoders'
        )
    for name, plain in _PLAIN.items():
        if (value := config.get(name, plain)) != plain:
            raise UserError(f"{CONFIG}: an SAE with {name} = {value} cannot be measured on raw rows")
    if form == "topk" and not (isinstance(config.get("k"), int) and config["k"] > 0):
        raise UserError(f"{CONFIG}: k must be a whole number of at least 1")
    return form


def _fit(tensors: dict[str, Tensor], names: tuple[str, ...]) -> bool:
    """Tell whether all tensors are there, and as wide as each other."""
    if tensors.keys() != set(names) or not all(tensors[name].dim() == 2 for name in ("W_enc", "W_dec")):
        return False
    (_, d_sae), (n_rows, d_out) = tensors["W_enc"].shape, tensors["W_dec"].shape
    per_latent = [tensors[name].shape == (d_sae,) for name in names[3:]]
    return n_rows == d_sae and tensors["b_dec"].shape == (d_out,) and all(per_latent)

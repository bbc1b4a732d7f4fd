"""The finished SAE in SAELens' format: a folder with `sae_weights.safetensors` and `cfg.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.files import replaced_folder, write_json, write_tensors
from trainer.saes.base import Sae

# The version of SAELens whose reader the files were tested with; readers convert by it.
SAE_LENS_VERSION = "6.54.12"


def export_sae(sae: Sae, folder: Path, metadata: dict[str, Any]) -> None:
    """Writes the SAE whole or not at all; raises `UserError` where the disk does not take it."""
    with replaced_folder(folder) as temporary:
        weights = {name: getattr(sae, name).float() for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
        write_tensors(temporary / "sae_weights.safetensors", weights)
        write_json(temporary / "cfg.json", _config(sae, metadata))


def origin(meta: dict[str, Any]) -> dict[str, Any]:
    """SAELens' names for what the data's meta.json says of where the activations were taken."""
    found = {
        "model_name": meta.get("model_name", meta.get("model")),
        "hook_name": meta.get("hook_name"),
        "context_size": meta.get("context_size"),
        "dataset_path": meta.get("dataset_path", meta.get("text")),
    }
    return {name: value for name, value in found.items() if value is not None}


def _config(sae: Sae, metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        **sae.export_config(),
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": SAE_LENS_VERSION, **metadata},
    }

"""Writes an SAE for other tools, in SAELens' or sparsify's format: a folder of a safetensors file and `cfg.json`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from trainer.checkpoints.atomic_folder import fill_folder, write_json, write_tensors
from trainer.contract.errors import UsageError
from trainer.contract.json_file import read_json
from trainer.contract.runs.features import CARD, FEATURES
from trainer.saes.base import Sae

# The version of SAELens whose reader the files were tested with; readers convert by it.
SAE_LENS_VERSION = "6.54.12"
# What `eval` writes beside the weights, and how its model card begins.
MODEL_CARD, CARD_TITLE = "README.md", "# Sparse autoencoder"
CONFIG, SAELENS_WEIGHTS, SPARSIFY_WEIGHTS = "cfg.json", "sae_weights.safetensors", "sae.safetensors"


def export_sae(sae: Sae, folder: Path, metadata: dict[str, Any]) -> None:
    """Write an SAE in SAELens' format.

    Write each file whole or not at all and leave others there alone; raise `UserError` where that fails.
    """
    with fill_folder(folder, last=CONFIG) as temporary:
        write_tensors(temporary / SAELENS_WEIGHTS, sae.export_weights())
        write_json(temporary / CONFIG, _config(sae, metadata))
    forget_card(folder)


def forget_card(folder: Path) -> None:
    """Remove the card of the weights that were here before."""
    readme = folder / MODEL_CARD
    with contextlib.suppress(OSError):
        for name in (CARD, FEATURES):
            (folder / name).unlink(missing_ok=True)
        if readme.read_text(errors="replace").startswith(CARD_TITLE):
            readme.unlink()


def exported_tokens(folder: Path) -> int | None:
    """Return how many tokens the SAE that `export_sae` has written to a folder had seen; None without one."""
    metadata = (read_json(folder / CONFIG, dict[str, Any]) or {}).get("metadata")
    tokens = metadata.get("training_tokens") if isinstance(metadata, dict) else None
    return tokens if isinstance(tokens, int) else None


def export_sparsify(sae: Sae, folder: Path) -> None:
    """Write an SAE in sparsify's format, which knows TopK of one width only and has no place for metadata.

    Raise `UsageError` for any other SAE.
    """
    own = sae.export_config()
    if own["architecture"] != "topk":
        raise UsageError(f"--format: sparsify knows TopK only, and this SAE is exported as {own['architecture']}")
    if sae.d_out != sae.d_in:
        raise UsageError(f"--format: sparsify knows one width only, and this maps {sae.d_in} dimensions to {sae.d_out}")
    weights = sae.export_weights()
    renamed = {
        # Its encoder is an nn.Linear.
        "encoder.weight": weights["W_enc"].T,
        "encoder.bias": weights["b_enc"],
        "W_dec": weights["W_dec"],
        "b_dec": weights["b_dec"],
    }
    with fill_folder(folder, last=CONFIG) as temporary:
        write_tensors(temporary / SPARSIFY_WEIGHTS, renamed)
        write_json(temporary / CONFIG, _sparsify_config(sae, own["k"]))
    forget_card(folder)


def origin(meta: dict[str, Any]) -> dict[str, Any]:
    """Return, under SAELens' names, what the data's meta.json says of where the activations were taken."""
    facts = {
        "model_name": meta.get("model_name", meta.get("model")),
        "hook_name": meta.get("hook_name"),
        "context_size": meta.get("context_size"),
        "dataset_path": meta.get("dataset_path", meta.get("text")),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _config(sae: Sae, metadata: dict[str, Any]) -> dict[str, Any]:
    return {
        **sae.export_config(),
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "dtype": "float32",
        "device": "cpu",
        **({"d_out": sae.d_out} if sae.is_transcoder else {}),
        "apply_b_dec_to_input": not sae.is_transcoder,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": {"sae_lens_version": SAE_LENS_VERSION, **metadata},
    }


def _sparsify_config(sae: Sae, k: int) -> dict[str, Any]:
    return {
        "activation": "topk",
        # Not read where num_latents is given; a whole number all the same.
        "expansion_factor": max(1, sae.d_sae // sae.d_in),
        "normalize_decoder": sae.unit_decoder,
        "num_latents": sae.d_sae,
        "k": k,
        "multi_topk": False,
        "skip_connection": False,
        "transcode": sae.is_transcoder,
        "d_in": sae.d_in,
    }

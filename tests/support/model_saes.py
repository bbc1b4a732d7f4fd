"""SAEs of two latents with random weights at the hooks of tiny models, as exported folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from support.features import features_file
from support.tiny_models import D_IN
from torch import Tensor

from trainer.contract.runs.features import FEATURES


def weights_of(n_targets: int = 1, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "W_enc": torch.randn(D_IN, 2, generator=generator) / 4,
        "b_enc": torch.tensor([0.1, -0.1]),
        "W_dec": torch.randn(2, n_targets * D_IN, generator=generator),
        "b_dec": torch.randn(n_targets * D_IN, generator=generator) / 10,
    }


def write_sae(folder: Path, model: Path, hook: str, hook_out: str = "", **metadata: Any) -> Path:
    """Write an SAE of two latents in SAELens's format; with `hook_out`, a transcoder."""
    n_targets = metadata.pop("n_targets", 1)
    weights = weights_of(n_targets)
    folder.mkdir(parents=True)
    save_file(weights, folder / "sae_weights.safetensors")
    kind = {"architecture": "transcoder", "d_out": n_targets * D_IN} if hook_out else {"architecture": "standard"}
    names = {"model_name": str(model), "hook_name": hook} | ({"hook_name_out": hook_out} if hook_out else {})
    config = {
        "d_in": D_IN, "d_sae": 2, "dtype": "float32", "apply_b_dec_to_input": not hook_out,
        "normalize_activations": "none", "reshape_activations": "none", "metadata": names | metadata,
    }  # fmt: skip
    (folder / "cfg.json").write_text(json.dumps(config | kind))
    (folder / FEATURES).write_bytes(features_file())
    return folder


def crosscoder_weights(n_parts: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "W_enc": torch.randn(n_parts * D_IN, 2, generator=generator) / 6,
        "b_enc": torch.tensor([0.1, -0.1]),
        "W_dec": torch.randn(2, n_parts * D_IN, generator=generator),
        "b_dec": torch.randn(n_parts * D_IN, generator=generator) / 10,
    }


def write_crosscoder(folder: Path, *parts: tuple[Path, str]) -> Path:
    """Write a crosscoder of two latents, which reads these models at these hooks."""
    write_sae(folder, parts[0][0], parts[0][1])
    save_file(crosscoder_weights(len(parts)), folder / "sae_weights.safetensors")
    config = json.loads((folder / "cfg.json").read_text()) | {"d_in": len(parts) * D_IN}
    config["metadata"] = {
        "model_name": "+".join(str(model) for model, _ in parts),
        "crosscoder_parts": [
            {"width": D_IN, "scale": 0.5**number, "name": hook, "model_name": str(model), "hook_name": hook}
            for number, (model, hook) in enumerate(parts)
        ],
    }
    (folder / "cfg.json").write_text(json.dumps(config))
    return folder


def acts_of(x: Tensor, weights: dict[str, Tensor], *, is_transcoder: bool = False) -> Tensor:
    inputs = x if is_transcoder else x - weights["b_dec"]
    return (inputs @ weights["W_enc"] + weights["b_enc"]).relu()

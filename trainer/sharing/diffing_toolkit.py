"""The diffing toolkit's `BatchTopKCrossCoder`: `config.json`, `model.safetensors` and `trainer_config.json`.

The class is in science-of-finetuning/crosscoder_learning, and these files are what `save_pretrained` writes there at
commit b2363ed (February 2026), plus the trainer's settings. From these settings, the toolkit's
`load_dictionary_model` (commit e0b84a5, July 2026) chooses the class of a model on the hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.checkpoints.atomic_folder import fill_folder, write_json, write_tensors
from trainer.contract.wording import join_words
from trainer.sharing.base import OF_RANKED, SCALES, Format, SharedSae, forget_card

CONFIG, WEIGHTS, TRAINER = "config.json", "model.safetensors", "trainer_config.json"
_CLASS = "BatchTopKCrossCoder"
# The threshold is compared with activations times a norm of their decoder rows; each kind of norm has a name and a
# number. Our threshold applies to the activations themselves, unless they are ranked by the sum of the norms of their
# parts. The rows do not have unit norm if a dimension has its own scale.
_PLAIN, _SUMMED = ("NONE", 4), ("CROSSCODER", 1)
# The class adds this to a part's scale before it divides by it.
_ADDED = 1e-8


class DiffingToolkit(Format):
    """Stores crosscoders with parts of one width and one threshold, as BatchTopK and Matryoshka have."""

    files = (CONFIG, WEIGHTS, TRAINER)

    def refusal(self, sae: SharedSae) -> str | None:
        if not sae.parts:
            return "the diffing toolkit's format is for crosscoders, but this SAE reads a single hook; use another"
        widths = [part.width for part in sae.parts]
        if len({*widths}) > 1:
            words = join_words([str(width) for width in widths])
            return f"the diffing toolkit needs parts of one width, but these have {words}; use --format saelens"
        threshold = sae.weights.get("threshold")
        if OF_RANKED in sae.metadata and SCALES in sae.metadata:
            return "the diffing toolkit would rank latents by other norms, since some dimensions have their own scale"
        is_one = threshold is not None and (OF_RANKED in sae.metadata or not (threshold != threshold[0]).any())
        if sae.form != "jumprelu" or not is_one or sae.k is None:
            return (
                f"{_CLASS} has a k and one threshold; train with sae.architecture = batch_topk, or use another format"
            )
        return None

    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        with fill_folder(folder, last=CONFIG) as temporary:
            write_tensors(temporary / WEIGHTS, _tensors(sae))
            write_json(temporary / TRAINER, _trainer(sae))
            write_json(temporary / CONFIG, _config(sae))
        forget_card(folder)
        return []


@torch.no_grad()
def _tensors(sae: SharedSae) -> dict[str, Tensor]:
    """Return the state dict, whose normaliser applies our scale of each part.

    The toolkit compares the norms of a latent's decoder rows between the parts, so these rows must be at the scales
    used in training; at the scales of raw activations, most latents would seem to belong to the part with the larger
    norms. The normaliser also subtracts b_dec. Instead, b_dec @ W_enc could be subtracted from the encoder's bias,
    but the difference of two large products is less accurate in fp32.
    """
    n_parts, width = len(sae.parts), sae.parts[0].width
    scales = torch.tensor([part.scale for part in sae.parts])
    divisors = (scales + _ADDED).double()[:, None, None]
    encoder = sae.weights["W_enc"].double().reshape(n_parts, width, sae.d_sae) / scales.double()[:, None, None]
    decoder = sae.weights["W_dec"].double().reshape(sae.d_sae, n_parts, width).transpose(0, 1) * divisors
    # A part's scale is target_rms / √(Σ activation_std² + 1e-8).
    std = ((scales.double() ** -2 - _ADDED) / width).sqrt().float()
    return {
        "encoder.weight": encoder.float(),
        "encoder.bias": sae.weights["b_enc"],
        "decoder.weight": decoder.float(),
        "decoder.bias": torch.zeros(n_parts, width),
        "code_normalization_id": torch.tensor(_normalisation(sae)[1]),
        "k": torch.tensor(sae.k, dtype=torch.int),
        "threshold": torch.tensor(sae.metadata[OF_RANKED]).float()
        if OF_RANKED in sae.metadata
        else sae.weights["threshold"][0].float(),
        "target_rms": torch.tensor(1.0),
        "activation_mean": sae.weights["b_dec"].reshape(n_parts, width),
        "activation_std": std[:, None].repeat(1, width),
        "activation_global_scale": scales,
    }


def _normalisation(sae: SharedSae) -> tuple[str, int]:
    return _SUMMED if OF_RANKED in sae.metadata else _PLAIN


def _config(sae: SharedSae) -> dict[str, Any]:
    """Return the constructor's arguments; the class refuses any other."""
    return {
        "activation_dim": sae.parts[0].width,
        "activation_mean": None,
        "activation_std": None,
        "code_normalization": _normalisation(sae)[0],
        "dict_class": _CLASS,
        "dict_size": sae.d_sae,
        "k": sae.k,
        "norm_init_scale": 1.0,
        "num_layers": len(sae.parts),
        "target_rms": 1.0,
    }


def _trainer(sae: SharedSae) -> dict[str, Any]:
    return {
        "trainer": {
            "dict_class": _CLASS,
            "activation_dim": sae.parts[0].width,
            "dict_size": sae.d_sae,
            "k": sae.k,
            "code_normalization": _normalisation(sae)[0],
            "layer": sae.metadata.get("hook_layer"),
            "lm_name": sae.metadata.get("model_name"),
            "submodule_name": sae.metadata.get("hook_name"),
            "target_rms": 1.0,
        },
        "metadata": sae.metadata,
    }

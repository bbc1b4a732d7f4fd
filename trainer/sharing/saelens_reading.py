"""Reads `cfg.json` and `sae_weights.safetensors` from SAELens versions 1 to 6."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import UsageError, UserError
from trainer.sharing.base import Given, SharedSae
from trainer.sharing.origins import ORIGIN, cleaned, origin_of
from trainer.sharing.reading import (
    PER_LATENT,
    checked,
    converted,
    positive,
    positive_thresholds,
    read_config,
    read_safetensors,
    table,
    taken,
    wanted,
    with_input_bias,
    with_row_scale,
    with_unit_rows,
)

# The metadata key under which an export for SAELens keeps the original values that it replaces.
ORIGINAL = "as_extracted"
# The metadata key that marks one part of a crosscoder.
PART = "crosscoder_part"
# The SAELens architectures that we can read and write.
ARCHITECTURES = (
    "standard",
    "topk",
    "jumprelu",
    "gated",
    "transcoder",
    "skip_transcoder",
    "jumprelu_transcoder",
    "jumprelu_skip_transcoder",
)
# The architecture of layers of cross-layer transcoders, which SAELens lacks. Only a run's own folder has it.
_OF_LAYERS = "topk_transcoder"
# Maps architectures in training checkpoints to our names; SAELens' `save_inference_model` writes them as "jumprelu".
_BATCHED = {"batchtopk": "batch_topk", "matryoshka_batchtopk": "matryoshka_batch_topk"}
# Maps current setting names to their names in versions 1 to 5.
_RENAMED = {"hook_name": "hook_point", "hook_layer": "hook_point_layer", "activation_fn": "activation_fn_str"}
# Maps each unsupported normalisation to the reason why it cannot be folded into the weights.
_NORMALISED = {
    "layer_norm": "it centres and scales each row separately",
    "constant_norm_rescale": "it scales each row separately to a fixed norm",
    "covariance_whitening": "its whitening is folded in only at the end of training",
}
_SCALED = ("expected_average_only_in", True)
# Matches the names of settings that may change the SAE's output. The settings in `_OF_TRAINING` do not change the
# output, or are handled by `read`.
_COMPUTES = re.compile(
    "normali|standardi|scal|bias|thresh|whiten|rotat|cent(er|re)|mean|(^|_)std|activation_f|postact|nonlin|softcap|"
    "clamp|clip|temperature|signed|tied|skip|affine|residual|error_term"
)
_OF_TRAINING = frozenset(
    [
        "activation_fn", "activation_fn_str", "activation_fn_kwargs", "normalize_activations", "apply_b_dec_to_input",
        "rescale_acts_by_decoder_norm", "finetuning_scaling_factor", "norm_scaling_factor", "normalize_sae_decoder",
        "scale_sparsity_penalty_by_decoder_norm", "jumprelu_init_threshold", "topk_threshold_lr", "noise_scale",
        "mse_loss_normalization", "dead_feature_threshold", "init_encoder_as_decoder_transpose", "autoscale",
        "n_batches_for_norm_estimate", "decoder_bias_init_method", "b_dec_init_method", "scale_aux_loss",
        "jumprelu_tanh_scale",
    ]
)  # fmt: skip


def read(folder: Path, files: tuple[str, str], given: Given) -> SharedSae:
    """Return the SAE in a folder; `files` contains the names of its settings and weights files."""
    config_file, weights_file = (folder / name for name in files)
    config = _in_todays_names(read_config(config_file, given))
    _refuse_part(config, config_file)
    architecture, k = _architecture(config, config_file)
    _refuse_unknown(config, config_file)
    tensors = read_safetensors(weights_file)
    tensors, folds = _without_extras(tensors, config, architecture, weights_file)
    own = "jumprelu" if architecture in _BATCHED else architecture
    sae = SharedSae(
        {"architecture": own} | ({"k": k} if own in ("topk", _OF_LAYERS) else {}),
        {},
        _metadata(config) | ({"training_architecture": _BATCHED[architecture]} if architecture in _BATCHED else {}),
        is_transcoder=own.endswith("transcoder"),
    )
    skip = ("W_skip",) if own.endswith("skip_transcoder") else ()
    names = {name: name for name in ("W_enc", "W_dec", "b_dec", *skip, *PER_LATENT[sae.form])}
    weights = taken(tensors, names, weights_file)
    k = k if sae.form == "topk" or (type(k) is int and 0 < k <= sae._replace(weights=weights).d_sae) else None
    sae = sae._replace(weights=weights, k=k, l0=positive(sae.metadata.get("l0")))
    sae = checked(positive_thresholds(sae), weights_file)
    return converted(_computed_as_here(sae, config, folds, config_file), weights_file)


def as_extracted(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's metadata, restoring the original values that an export for SAELens replaced."""
    original = metadata.get(ORIGINAL)
    others = {name: value for name, value in metadata.items() if name != ORIGINAL}
    return others | original if isinstance(original, dict) else others


def _refuse_part(config: dict[str, Any], file: Path) -> None:
    """Raise `UsageError` for one part of a crosscoder, whose activations need all parts."""
    if PART in table(config, "metadata"):
        raise UsageError(
            f"{file} holds one part of a crosscoder, whose activations need all parts; export the crosscoder with "
            f"--format saelens"
        )


def _in_todays_names(config: dict[str, Any]) -> dict[str, Any]:
    known = {new: config[old] for new, old in _RENAMED.items() if old in config and config.get(new) is None}
    return config | known


def _architecture(config: dict[str, Any], file: Path) -> tuple[str, Any]:
    """Return the architecture and k; up to version 5, TopK was an activation function of "standard"."""
    # Before version 6, files without an architecture were "standard" SAEs.
    wanted(
        config, file, architecture=(None, *ARCHITECTURES, *_BATCHED, _OF_LAYERS), activation_fn=("relu", None, "topk")
    )
    architecture, k = config.get("architecture") or "standard", config.get("k")
    kwargs = config.get("activation_fn_kwargs") or {}
    if config.get("activation_fn") == "topk":
        wanted(config, file, architecture=("standard", None, "topk"))
        architecture = "topk"
    if architecture == "topk" and isinstance(kwargs, dict):
        wanted(kwargs, file, signed=(False, None))
        kwargs = {name: value for name, value in kwargs.items() if name != "signed"}
        k = kwargs.pop("k", k)
    if kwargs:
        name = next(iter(kwargs)) if isinstance(kwargs, dict) else str(kwargs)
        raise UsageError(f"{file}: activation_fn_kwargs has {name[:60]!r}, which is not supported")
    return str(architecture), k


def _refuse_unknown(config: dict[str, Any], file: Path) -> None:
    """Raise `UsageError` for an unknown setting that may change the SAE's output."""
    for name, value in config.items():
        if name not in _OF_TRAINING and _COMPUTES.search(name) and not _is_neutral(value):
            raise UsageError(
                f"{file}: {name[:60]} is {str(value)[:60]!r}, and its effect is unknown; if it has no effect, use "
                f"--config {name[:60]}=null"
            )


def _is_neutral(value: object) -> bool:
    """Return whether a setting with this value has no effect because it is off or a factor of 1."""
    # In Python, True equals 1.
    return value is not True and value in (None, False, "none", 0, 1, {}, [])


def _without_extras(
    tensors: dict[str, Tensor], config: dict[str, Any], architecture: str, file: Path
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return an SAE's tensors for inference, and the factor [d_sae] for the decoder's input, if any."""
    tensors = dict(tensors)
    if architecture in ("jumprelu", "jumprelu_transcoder", "jumprelu_skip_transcoder") and "log_threshold" in tensors:
        tensors["threshold"] = tensors.pop("log_threshold").double().exp().float()
    factor = tensors.pop("finetuning_scaling_factor", tensors.pop("scaling_factor", None))
    if architecture in _BATCHED:
        bar = tensors.pop("topk_threshold", torch.ones(2))
        if bar.numel() != 1 or not bar.is_floating_point() or "b_enc" not in tensors:
            raise UserError(f"{file} has no topk_threshold; write the SAE again with SAELens' `save_inference_model`")
        tensors["threshold"] = torch.full_like(tensors["b_enc"].float(), float(bar))
    return tensors, _used_factor(factor, config, tensors, file)


def _used_factor(
    factor: Tensor | None, config: dict[str, Any], tensors: dict[str, Tensor], file: Path
) -> Tensor | None:
    """Return the fine-tuned factors [d_sae] for the activations, or None if they are all 1 or unused."""
    is_used = config.get("finetuning_scaling_factor")
    if factor is None or not factor.is_floating_point() or (factor.float() == 1).all() or is_used is False:
        return None
    if is_used is not True:
        raise UsageError(
            f"{file}: scaling_factor is not 1 everywhere, and the settings do not say whether it is used; use "
            f"--config finetuning_scaling_factor=true or =false"
        )
    if factor.shape != tensors.get("W_dec", factor).shape[:1] or not factor.isfinite().all():
        raise UserError(f"{file}: scaling_factor must have one finite number per latent")
    return factor.float()


def _computed_as_here(sae: SharedSae, config: dict[str, Any], factor: Tensor | None, file: Path) -> SharedSae:
    """Fold operations that the settings add, such as scaling, into an SAE's weights."""
    wanted(config, file, reshape_activations=("none", None, "hook_z"))
    weights, is_batched = sae.weights, config.get("architecture") in _BATCHED
    is_rescaled = (sae.architecture == "topk" or is_batched) and config.get("rescale_acts_by_decoder_norm", False)
    if factor is not None:
        weights = weights | {"W_dec": weights["W_dec"] * factor[:, None]}
    if (scale := _row_scale(sae, config, file)) is not None:
        weights = with_row_scale(weights, scale)
        if is_rescaled and is_batched:
            # The threshold applies to activations times decoder norms, and these norms were divided by `scale`.
            weights["threshold"] = weights["threshold"] / scale
    # True is SAELens' default.
    subtracts = config.get("apply_b_dec_to_input", True)
    if sae.is_transcoder and subtracts and "apply_b_dec_to_input" in config:
        wanted(config, file, apply_b_dec_to_input=(False,))
    if not sae.is_transcoder and not subtracts:
        weights = with_input_bias(weights)
    if is_rescaled:
        weights = with_unit_rows(weights)
    return sae._replace(weights=weights)


def _row_scale(sae: SharedSae, config: dict[str, Any], file: Path) -> float | None:
    """Return the factor for the encoder's input rows, or None if they are not scaled.

    Raise `UsageError` if the factor is unknown.
    """
    value, factor = config.get("normalize_activations"), positive(config.get("norm_scaling_factor"))
    if config.get("norm_scaling_factor") is None and value in (None, False, "none"):
        return None
    if isinstance(value, str) and value in _NORMALISED:
        raise UsageError(
            f"{file}: normalize_activations is {value!r}: {_NORMALISED[value]}, which no supported architecture does; "
            f"if your rows are already normalised, use --config normalize_activations=none"
        )
    wanted(config, file, normalize_activations=("none", None, *_SCALED))
    if sae.is_transcoder or factor is None:
        raise UsageError(
            f"{file}: normalize_activations is {str(value)!r}: training multiplies rows by √d_in / their mean norm, "
            f"but the files do not contain this factor; set it with --config norm_scaling_factor=NUMBER"
        )
    return factor


def _metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Return an SAE's metadata; version 6 has a metadata table, while older versions mix metadata with settings."""
    facts = as_extracted(table(config, "metadata"))
    flat = {name: config[name] for name in ORIGIN if name in config}
    if isinstance(hook := flat.get("hook_name"), str):
        # Version 1 stores the layer separately: "blocks.{layer}.hook_resid_pre".
        flat["hook_name"] = hook.replace("{layer}", str(config.get("hook_layer")))
    facts = cleaned({**flat, **{name: value for name, value in facts.items() if value is not None}})
    return facts | origin_of(facts)

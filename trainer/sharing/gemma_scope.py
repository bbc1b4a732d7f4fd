"""Reads Gemma Scope 1 (`params.npz`) and Gemma Scope 2 (`params.safetensors`, mostly with a `config.json`)."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.contract.errors import UsageError
from trainer.saes.base import saelens_name
from trainer.sharing.base import NOTHING_GIVEN, Format, Given, SharedSae, folder_of, holds
from trainer.sharing.origins import of_hook, of_module, origin_of
from trainer.sharing.reading import (
    checked,
    converted,
    positive,
    positive_thresholds,
    read_config,
    read_npz,
    read_safetensors,
    taken,
    wanted,
    with_given,
    with_input_bias,
)

CONFIG, FIRST, SECOND = "config.json", "params.npz", "params.safetensors"
_SKIP = "affine_skip_connection"
# Matches a Gemma Scope 1 repository, "gemma-scope-2b-pt-res", with folders like "layer_12/width_16k/average_l0_60".
_REPOSITORY = re.compile(r"gemma-scope-(2b|9b|27b)-(pt|it)-(res|mlp|att|transcoders)\b")
# Matches a Gemma Scope 2 repository, "gemma-scope-2-1b-pt", and folders like
# "transcoder_all/layer_7_width_16k_l0_small".
_SECOND_REPOSITORY = re.compile(r"gemma-scope-2-(270m|1b|4b|12b|27b)-(pt|it)\b")
_SECOND_SITE = re.compile(r"(resid_post|mlp_out|attn_out|transcoder)(?:_all)?/layer_([0-9]{1,4})_[^/]*$")
_SECOND_HOOKS = {
    "resid_post": "output",
    "mlp_out": "post_feedforward_layernorm.output",
    "attn_out": "self_attn.o_proj.input",
    "transcoder": "pre_feedforward_layernorm.output",
}
_LAYER, _L0 = re.compile(r"layer_([0-9]{1,4})(?=_|/|$)"), re.compile(r"average_l0_([0-9]{1,6})")
_SITES = {"res": "resid_post", "mlp": "mlp_out"}
# Gemma Scope 1 transcoders were trained with the pre-MLP norm's gain folded into the MLP, according to the README of
# google/gemma-scope-2b-pt-transcoders.
_WITHOUT_GAIN = (
    "it reads the MLP's input before the norm's gain is applied; divide rows of mlp_in by 1 + the weight of "
    "pre_feedforward_layernorm in this block"
)


class GemmaScope(Format):
    """Reads JumpReLU SAEs and transcoders, which encode x instead of x − b_dec."""

    reads = ((FIRST,), (CONFIG, SECOND), (SECOND,))

    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        raise UsageError("--format: gemma-scope can only be imported; choose another format")

    def read(self, place: Path, given: Given = NOTHING_GIVEN) -> SharedSae:
        folder = folder_of(place)
        is_second = holds(folder, SECOND) and place.name != FIRST
        if is_second:
            file, config = folder / SECOND, _settings(folder, given)
            tensors = read_safetensors(file)
        else:
            file, config = folder / FIRST, with_given(_by_path(folder), given)
            tensors = read_npz(file)
        wanted(config, folder / CONFIG, architecture=("jump_relu",), type=(None, "sae", "transcoder"))
        sae = _shared(_in_one_case(tensors), config, given, file)
        if sae.is_transcoder and not is_second:
            sae = sae._replace(notes=(_WITHOUT_GAIN,))
        sae = checked(positive_thresholds(sae), file)
        return converted(sae if sae.is_transcoder else sae._replace(weights=with_input_bias(sae.weights)), file)


def _in_one_case(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under their Gemma Scope 1 names, such as "W_enc" instead of "w_enc"."""
    return {f"W{name[1:]}" if name in ("w_enc", "w_dec") else name: one for name, one in tensors.items()}


def _shared(tensors: dict[str, Tensor], config: dict[str, Any], given: Given, file: Path) -> SharedSae:
    is_affine = config.get("affine_connection") is True or _SKIP in tensors
    is_transcoder = given.transcoder or config.get("type") == "transcoder" or is_affine
    if config.get("type") == "sae":
        wanted(config, file, affine_connection=(False, None))
    hooks = config.get("hf_hook_point_in"), config.get("hf_hook_point_out")
    if config.get("type") is None and all(isinstance(one, str) for one in hooks) and hooks[0] != hooks[1]:
        is_transcoder = True
    names = {name: name for name in ("W_enc", "W_dec", "b_enc", "b_dec", "threshold")}
    names |= {"W_skip": _SKIP} if is_affine else {}
    # Gemma Scope stores W_skip as [d_in, d_out].
    weights = taken(tensors, names, file, transposed=("W_skip",) if is_affine else ())
    return SharedSae(
        {"architecture": saelens_name("jumprelu", is_transcoder=is_transcoder, has_skip=is_affine)},
        weights,
        {"training_architecture": "jumprelu", **_origin(config, is_transcoder=is_transcoder)},
        is_transcoder=is_transcoder,
        l0=positive(config.get("l0")),
    )


def _origin(config: dict[str, Any], *, is_transcoder: bool) -> dict[str, Any]:
    facts = {name: config.get(name) for name in ("model_name", "hook_name", "hook_name_out", "hook_layer")}
    if isinstance(model := facts["model_name"], str):
        # Gemma Scope 2 calls google/gemma-3-1b-pt "gemma-v3-1b-pt".
        facts["model_name"] = re.sub(r"^(google/)?gemma-v3-", "google/gemma-3-", model)
    for name, module, hook in (
        ("hf_hook_point_in", "module", "hook_name"),
        ("hf_hook_point_out", "module_out", "hook_name_out"),
    ):
        if isinstance(point := config.get(name), str) and (is_transcoder or module == "module"):
            facts |= _place(point, module, hook)
    return origin_of(facts)


def _place(point: str, module: str, hook: str) -> dict[str, Any]:
    """Return the origin for a hook point in Gemma Scope 2, such as "model.layers.7.output"."""
    path, _, end = point.rpartition(".")
    if match := re.fullmatch(r"(?:.*\.)?layers\.([0-9]{1,4})\.self_attn\.o_proj", path):
        return {hook: f"blocks.{match[1]}.attn.hook_z", "hook_layer": int(match[1])} if end == "input" else {}
    found = of_module(path) if end == "output" else {}
    return {hook: found["hook_name"], module: path} if found else {hook: point}


def _settings(folder: Path, given: Given) -> dict[str, Any]:
    """Return a Gemma Scope 2 SAE's settings; if there is no settings file, derive them from the path."""
    if os.path.lexists(folder / CONFIG):
        return read_config(folder / CONFIG, given)
    path, config = folder.absolute().as_posix(), {"architecture": "jump_relu"}
    if repository := _last(_SECOND_REPOSITORY, path):
        size, tuning = repository.groups()
        config["model_name"] = f"google/gemma-3-{size}-{tuning}".replace("270m-pt", "270m")
    config = with_given(config | _second_place(path), given)
    if "type" not in config and not given.transcoder:
        raise UsageError(
            f"{folder / CONFIG} is missing, and the path does not say whether it is an SAE or a transcoder; use "
            f"--config type=sae or --config type=transcoder"
        )
    return config


def _second_place(path: str) -> dict[str, Any]:
    match = _SECOND_SITE.search(path)
    if match is None:
        return {}
    site, block = match[1], f"model.layers.{match[2]}"
    config = {"type": "sae", "hf_hook_point_in": f"{block}.{_SECOND_HOOKS[site]}"}
    if site == "transcoder":
        config |= {"type": site, "hf_hook_point_out": f"{block}.{_SECOND_HOOKS['mlp_out']}"}
    return config


def _by_path(folder: Path) -> dict[str, Any]:
    """Derive the settings of a Gemma Scope 1 SAE, which has no settings file, from its path."""
    path = folder.absolute().as_posix()
    repository, layer, l0 = (_last(pattern, path) for pattern in (_REPOSITORY, _LAYER, _L0))
    config: dict[str, Any] = {"architecture": "jump_relu", "l0": float(l0[1]) if l0 else None}
    if repository:
        size, tuning, site = repository.groups()
        config["model_name"] = f"google/gemma-2-{size}{'-it' if tuning == 'it' else ''}"
        config["type"] = "transcoder" if site == "transcoders" else "sae"
        if layer:
            config |= _hooks(site, int(layer[1]))
    return config


def _last(pattern: re.Pattern[str], path: str) -> re.Match[str] | None:
    return max(pattern.finditer(path), key=lambda match: match.start(), default=None)


def _hooks(site: str, layer: int) -> dict[str, Any]:
    if site == "transcoders":
        place = {"hook_name": f"blocks.{layer}.ln2.hook_normalized", "hook_layer": layer}
        return place | {"hook_name_out": of_hook("mlp_out", layer)["hook_name"]}
    if site == "att":
        return {"hook_name": f"blocks.{layer}.attn.hook_z", "hook_layer": layer}
    return of_hook(_SITES[site], layer)

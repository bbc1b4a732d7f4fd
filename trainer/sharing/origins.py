"""An SAE's origin: its model, hook and text, as stated in other tools' files and folder names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.contract.printable import printable
from trainer.contract.settings.hooks import Hook, parse_hook

# An origin's fields and their types. An import keeps these fields, and every later export writes them.
ORIGIN: dict[str, type | tuple[type, ...]] = {
    "model_name": str,
    "hook_name": str,
    "hook_name_out": str,
    "hook_layer": int,
    "module": str,
    "module_out": str,
    "context_size": int,
    "dataset_path": str,
    "prepend_bos": bool,
    "exclude_special_tokens": bool,
    "data_digest": str,
}
# The fields that identify the training data.
DATA_NAMES = ("hook_name", "module", "data_digest")
# The maximum string length and the largest number allowed, because files from other people may contain any values.
_LONGEST, _LARGEST = 200, 2**31
# Matches a module name in transformers; sparsify and Gemma Scope 2 name hooks after modules.
_MODULE = re.compile(r"(?:.*\.)?(?:layers|h|blocks)[._]([0-9]{1,4})(?:\.([a-z_.]+))?")
_SITES = {
    "": "resid_post",
    "mlp": "mlp_out",
    "post_feedforward_layernorm": "mlp_out",
    "pre_feedforward_layernorm": "mlp_in",
    "attn": "attn_out",
    "self_attn": "attn_out",
    "attention": "attn_out",
}
# Matches hook names in dictionary_learning's scripts, such as "resid_post_layer_3" and "mlp_out_layer3".
_SUBMODULE = re.compile(r"(resid_post|resid_out|mlp_out|attn_out|attention_out)_layer_?([0-9]{1,4})")


def cleaned(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Remove origin fields with the wrong type from metadata, and make strings in origin fields short and printable."""
    others = {name: value for name, value in facts.items() if name not in ORIGIN}
    return others | {name: _short(facts[name]) for name, kind in ORIGIN.items() if _is_a(facts.get(name), kind)}


def origin_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the origin fields of metadata, and add the layer if the hook's name contains it."""
    origin = {name: value for name, value in cleaned(facts).items() if name in ORIGIN}
    layer = layer_of(origin.get("hook_name"))
    return origin if layer is None else origin | {"hook_layer": layer}


def layer_of(hook: object) -> int | None:
    """Return the layer of a hook named in our style or TransformerLens's, or None for other hooks."""
    try:
        place = parse_hook(str(hook))
    except ValueError:
        return None
    return None if place.path else place.layer


def of_module(name: str, *, is_transcoder: bool = False) -> dict[str, Any]:
    """Return the origin fields for a transformers module; "layers.10" means the residual stream after block 10.

    A transcoder for an MLP module maps the MLP's input to its output. Return {} for an unknown module.
    """
    match = _MODULE.fullmatch(name)
    site = _SITES.get(match[2] or "") if match else None
    if match is None or site is None:
        return {}
    if is_transcoder and site == "mlp_out":
        return of_hook("mlp_in", int(match[1])) | {"hook_name_out": Hook("mlp_out", int(match[1])).transformer_lens}
    return of_hook(site, int(match[1]))


def of_submodule(name: str) -> dict[str, Any]:
    """Return the origin fields for a dictionary_learning submodule; an unknown name is kept unchanged."""
    match = _SUBMODULE.fullmatch(name)
    if match is None:
        return {"hook_name": name}
    site = {"resid_out": "resid_post", "attention_out": "attn_out"}.get(match[1], match[1])
    return of_hook(site, int(match[2]))


def of_hook(site: str, layer: int) -> dict[str, Any]:
    """Return the origin fields for one of our hook sites at a layer."""
    return {"hook_name": Hook(site, layer).transformer_lens, "hook_layer": layer}


def _is_a(value: object, kind: type | tuple[type, ...]) -> bool:
    if kind is int:
        return type(value) is int and 0 <= value < _LARGEST
    return isinstance(value, kind) and value != ""


def _short(value: Any) -> Any:
    return printable(value)[:_LONGEST] if isinstance(value, str) else value

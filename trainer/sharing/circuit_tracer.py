"""circuit-tracer's format: transcoder sets with one `layer_N.safetensors` per layer and a shared `config.yaml`.

Read from github.com/decoderesearch/circuit-tracer at commit 4bb8c0e (version 0.4.1, April 2026). The package of this
name on PyPI is a fork, which does not read `activation` and `k` from config.yaml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from trainer.checkpoints.atomic_folder import fill_folder, sync, write_tensors
from trainer.contract.files import write_whole
from trainer.contract.hub_cache import is_plain_file
from trainer.contract.wording import join_words
from trainer.saes.base import saelens_name
from trainer.saes.layer import Layer
from trainer.sharing.base import (
    BELOW_K,
    NOTHING_GIVEN,
    Format,
    Given,
    SharedSae,
    folder_of,
    forget_card,
    holds,
    refusal_of_several_hooks,
)
from trainer.sharing.origins import origin_of
from trainer.sharing.reading import checked, converted, read_safetensors, read_text, taken, wanted, with_given

CONFIG = "config.yaml"
_THRESHOLD = "activation_function.threshold"
_TOPK, _K, _MOST_DIGITS = "topk", "k", 10
# Unless the activation is TopK, it is a JumpReLU if there is a threshold tensor, and otherwise a ReLU.
_ACTIVATIONS = ("", "null", "relu", "jumprelu", "jump_relu", _TOPK)
# Below this share, rows with negative activations are too rare to mention.
_LEAST_SHARE = 1e-4
_OF_TOPK = (
    "circuit-tracer reads TopK transcoders from config.yaml since April 2026, but the package on PyPI is a fork that "
    "takes them for ReLU; install it from github.com/decoderesearch/circuit-tracer"
)
LAYER_FILE = re.compile(r"layer_[0-9]{1,4}\.safetensors")
_SETTING = re.compile(r"([a-z_]+):[ \t]*([^#\[{|>&*!]*?)(?:[ \t]+#.*)?")


class CircuitTracer(Format):
    """Stores sets of transcoders with d_in = d_out and a ReLU, JumpReLU or TopK activation, with one file per layer.

    A cross-layer transcoder, with a ReLU or JumpReLU activation, has two files per layer.
    """

    files = (CONFIG, "layer_*.safetensors", "W_enc_*.safetensors", "W_dec_*.safetensors")
    reads = ((CONFIG, "layer_N.safetensors"),)

    def opening(self, repository: str) -> str:
        # Its command reads sets only from the hub (`utils/hf_utils.py`, commit 4bb8c0e).
        name = repository.rpartition("/")[2]
        graphs = f"--slug {name} --graph_file_dir graphs --server"
        return f"circuit-tracer attribute --transcoder_set {repository} --prompt 'The capital of France is' {graphs}"

    def refusal(self, sae: SharedSae) -> str | None:
        if sae.layer:
            if sae.d_in != sae.d_out // sae.layer.n_targets:
                return "circuit-tracer needs cross-layer transcoders whose inputs and targets have the same width"
            lacks = "circuit-tracer has no TopK cross-layer transcoders; train with batch_topk or jumprelu"
            return lacks if sae.form == _TOPK else None
        if reason := refusal_of_several_hooks(sae, "circuit-tracer"):
            return reason
        if not sae.is_transcoder:
            return (
                "circuit-tracer supports only transcoders, but this is an SAE; train a transcoder with data.hook = "
                "mlp.LAYER"
            )
        if sae.d_in != sae.d_out:
            return f"circuit-tracer needs d_out = d_in, but this maps {sae.d_in} dimensions to {sae.d_out}"
        if sae.form not in ("standard", "jumprelu", _TOPK):
            return f"circuit-tracer supports ReLU, JumpReLU and TopK, but this is exported as {sae.architecture}"
        return None

    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        self.write_set([sae], folder)
        return notes_of_set([member_of(sae)])

    def write_set(self, saes: Iterable[SharedSae], folder: Path) -> None:
        """Write transcoders for different layers as one set, atomically.

        The caller must check `refusal` for each transcoder, and `refusal_of_set`.
        """
        with fill_folder(folder, last=CONFIG) as temporary:
            for sae in saes:
                if sae.layer:
                    _write_layer(sae, sae.layer, temporary)
                    continue
                write_tensors(temporary / f"layer_{layer_of(sae) or 0}.safetensors", _tensors(sae))
                write_whole(temporary / CONFIG, _config(sae))
            sync(temporary / CONFIG)
        forget_card(folder)

    def recognises(self, place: Path) -> bool:
        return holds(folder_of(place), CONFIG) and layer_file(place) is not None

    def read(self, place: Path, given: Given = NOTHING_GIVEN) -> SharedSae:
        file = layer_file(place) or place
        config = with_given(_read_yaml(folder_of(place) / CONFIG), given)
        of_set = folder_of(place) / CONFIG
        wanted(config, of_set, model_kind=("transcoder_set",), activation=_ACTIVATIONS)
        tensors = read_safetensors(file)
        # circuit-tracer's own `to_safetensors` also stores a TopK's k as a 0-dim tensor.
        stored_k = tensors.pop(_K, None)
        names = {"W_enc": "W_enc", "W_dec": "W_dec", "b_enc": "b_enc", "b_dec": "b_dec"}
        names |= {"threshold": _THRESHOLD} if _THRESHOLD in tensors else {}
        names |= {"W_skip": "W_skip"} if "W_skip" in tensors else {}
        weights = taken(tensors, names, file, transposed=("W_enc",))
        form = "jumprelu" if "threshold" in weights else "standard"
        k = None
        if config.get("activation") == _TOPK:
            # `_read_yaml` returns all values as strings.
            text = str(config.get(_K) or ("" if stored_k is None else stored_k.tolist()))
            form, k = _TOPK, int(text) if text.isdecimal() and len(text) < _MOST_DIGITS else None
        name = saelens_name(form, is_transcoder=True, has_skip="W_skip" in weights)
        own = {"architecture": name, **({"k": k} if form == _TOPK else {})}
        facts = _origin(config, int(file.stem.removeprefix("layer_")))
        # With a threshold below 0, circuit-tracer would let negative activations through, so `checked` refuses such
        # thresholds.
        sae = checked(SharedSae(own, weights, facts, k=k, is_transcoder=True), file)
        return converted(sae, file)


def layer_file(place: Path) -> Path | None:
    """Return a layer's file: the path itself, or the only layer file in a folder; None if there is neither."""
    files = place.glob("layer_*.safetensors") if place.is_dir() else [place]
    layers = [one for one in files if LAYER_FILE.fullmatch(one.name) and is_plain_file(one)]
    return layers[0] if len(layers) == 1 else None


def _read_yaml(file: Path) -> dict[str, Any]:
    """Return the top-level values of a YAML file as strings; the files of transcoder sets have no nested settings."""
    lines = (_SETTING.fullmatch(line) for line in read_text(file).splitlines())
    return {match[1]: match[2].strip().strip("\"'") for match in lines if match}


def _origin(config: dict[str, Any], layer: int) -> dict[str, Any]:
    indices = {"hook_name": config.get("feature_input_hook"), "hook_name_out": config.get("feature_output_hook")}
    named = {name: f"blocks.{layer}.{site}" for name, site in indices.items() if isinstance(site, str) and site}
    return origin_of({"model_name": config.get("model_name"), "hook_layer": layer, **named})


class Member(NamedTuple):
    """The properties of a transcoder that must be equal within a set, and its layer, which must be unique.

    `below_k` is the share of held-out rows with fewer than k positive pre-activations, or None if it is unknown.
    """

    layer: int | None
    d_in: int
    d_sae: int
    has_skip: bool
    k: int | None
    config: str
    below_k: float | None = None
    place: Layer | None = None


def member_of(sae: SharedSae) -> Member:
    """Return the properties of a transcoder that matter for its set."""
    share = sae.metadata.get(BELOW_K)
    known = float(share) if isinstance(share, int | float) else None
    return Member(layer_of(sae), sae.d_in, sae.d_sae, sae.has_skip, _k_of(sae), _config(sae), known, sae.layer)


def refusal_of_set(members: Sequence[Member]) -> str | None:
    """Return why the transcoders cannot form a set, or None if they can."""
    if places := [one.place for one in members if one.place]:
        is_whole = [place.number for place in places] == [*range(places[0].n_layers)]
        if not is_whole or len(places) < len(members):
            return "a cross-layer transcoder is exported with all its layers; leave out --only, and export one run"
        return _difference(members)
    layers = [one.layer for one in members]
    if None in layers:
        number = layers.index(None) + 1
        return f"the data of transcoder {number} does not name its layer; export it separately and rename it"
    if twice := [layer for layer in layers if layers.count(layer) > 1]:
        return f"several transcoders belong to layer {twice[0]}; give one run for each layer"
    return _difference(members)


def _difference(members: Sequence[Member]) -> str | None:
    """Return why transcoders with different properties cannot form a set, or None if all properties match."""
    for name in ("d_in", "d_sae", "has_skip", "k"):
        if len(values := {getattr(one, name) for one in members}) > 1:
            listed = " and ".join(sorted(map(str, values)))
            return f"circuit-tracer requires all transcoders of a set to match, but {name} is {listed}"
    if len({one.config for one in members}) > 1:
        return "the transcoders belong to different models or sites; give runs on the MLPs of one model"
    return None


def notes_of_set(members: Sequence[Member]) -> list[str]:
    """Return notes about a written set: on unknown or missing layers, on TopK, and on negative activations.

    circuit-tracer applies no ReLU after its TopK, so a token with fewer than k positive pre-activations also gets
    negative ones.
    """
    layers = [one.layer for one in members]
    if members[0].place:
        return _notes_of_layers(layers)
    notes = ["the data does not name its layer; rename layer_0.safetensors after the layer"] if None in layers else []
    known = {layer for layer in layers if layer is not None}
    if missing := sorted(set(range(max(known, default=0))) - known):
        listed = ", ".join(map(str, missing))
        lacking = f"layers {listed} are missing"
        notes.append(f"circuit-tracer loads sets that start at layer 0 and have no gaps, but {lacking}")
    if not (of_topk := [one for one in members if one.k is not None]):
        return notes
    shares = [one.below_k for one in of_topk if one.below_k is not None]
    if (largest := max(shares, default=0.0)) >= _LEAST_SHARE:
        notes.append(
            f"on up to {100 * largest:.2g} % of a layer's held-out rows, fewer than k pre-activations are positive; "
            "circuit-tracer also keeps the negative ones, which were 0 in training"
        )
    return [*notes, _OF_TOPK]


def _notes_of_layers(layers: Sequence[int | None]) -> list[str]:
    if layers == [*range(len(layers))]:
        return []
    named = "unknown layers" if None in layers else f"layers {join_words([*map(str, layers)])}"
    return [f"circuit-tracer numbers the layers of a cross-layer transcoder from 0, but these are {named} of the model"]


def layer_of(sae: SharedSae) -> int | None:
    """Return the layer of a transcoder's input, used in the file name, or None if unknown."""
    layer = sae.metadata.get("hook_layer")
    return layer if isinstance(layer, int) and layer >= 0 else None


def _k_of(sae: SharedSae) -> int | None:
    """Return a TopK transcoder's k, or None for other architectures."""
    return int(sae.config["k"]) if sae.form == _TOPK else None


def _tensors(sae: SharedSae) -> dict[str, Tensor]:
    # circuit-tracer stores both matrices with one row per latent.
    tensors = {name: sae.weights[name] for name in ("W_dec", "b_enc", "b_dec")}
    tensors["W_enc"] = sae.weights["W_enc"].T
    if sae.has_skip:
        tensors["W_skip"] = sae.weights["W_skip"]
    if "threshold" in sae.weights:
        tensors[_THRESHOLD] = sae.weights["threshold"]
    return tensors


def _write_layer(sae: SharedSae, place: Layer, folder: Path) -> None:
    """Write the two files of a layer; decoder rows [d_sae, n_targets, d_out] start with the layer's own target."""
    number, weights = place.number, sae.weights
    d_out = sae.d_out // place.n_targets
    own = {"W_enc": weights["W_enc"].T, "b_enc": weights["b_enc"], "b_dec": weights["b_dec"][:d_out]}
    own |= {"threshold": weights["threshold"]} if "threshold" in weights else {}
    decoder = weights["W_dec"].reshape(sae.d_sae, place.n_targets, d_out)
    write_tensors(folder / f"W_enc_{number}.safetensors", {f"{name}_{number}": one for name, one in own.items()})
    write_tensors(folder / f"W_dec_{number}.safetensors", {f"W_dec_{number}": decoder})
    write_whole(folder / CONFIG, _config(sae))


def _config(sae: SharedSae) -> str:
    """Return a transcoder set's settings as YAML; JSON strings are valid YAML strings."""
    facts = sae.metadata
    settings = {
        "model_kind": "cross_layer_transcoder" if sae.layer else "transcoder_set",
        "model_name": facts.get("model_name", ""),
        "feature_input_hook": _site(facts.get("hook_name")),
        "feature_output_hook": _site(facts.get("hook_name_out")),
        "scan": "",
        **({"activation": _TOPK, "k": k} if (k := _k_of(sae)) is not None else {}),
    }
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())


def _site(hook: object) -> str:
    """Return a hook's name within its TransformerLens block, such as "mlp.hook_in"."""
    text = str(hook or "")
    return text.split(".", 2)[2] if text.startswith("blocks.") and text.count(".") > 1 else text

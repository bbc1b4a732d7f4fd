"""circuit-tracer: a layer of a transcoder set, `layer_N.safetensors`, and the set's `config.yaml`."""

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
from trainer.saes.base import saelens_name
from trainer.sharing.base import NOTHING_GIVEN, Format, Given, Shared, folder_of, forget_card, holds
from trainer.sharing.origins import origin_of
from trainer.sharing.reading import checked, converted, read_safetensors, read_text, taken, wanted, with_given

CONFIG = "config.yaml"
_THRESHOLD = "activation_function.threshold"
LAYER_FILE = re.compile(r"layer_[0-9]{1,4}\.safetensors")
_SETTING = re.compile(r"([a-z_]+):[ \t]*([^#\[{|>&*!]*?)(?:[ \t]+#.*)?")


class CircuitTracer(Format):
    """Holds transcoders of one width with a ReLU or a threshold; the files of all layers together make a set."""

    files = (CONFIG, "layer_*.safetensors")
    reads = ((CONFIG, "layer_N.safetensors"),)

    def refusal(self, sae: Shared) -> str | None:
        if not sae.is_transcoder:
            return "circuit-tracer takes transcoders, and this is an SAE; train one with data.hook = mlp.LAYER"
        if sae.d_in != sae.d_out:
            return f"circuit-tracer knows one width only, and this maps {sae.d_in} dimensions to {sae.d_out}"
        if sae.form not in ("standard", "jumprelu"):
            return f"circuit-tracer knows a ReLU or a threshold, and this is exported as {sae.architecture}"
        return None

    def write(self, sae: Shared, folder: Path) -> list[str]:
        self.write_set([sae], folder)
        told = layer_of(sae) is not None
        return [] if told else ["the data does not tell its layer: rename layer_0.safetensors after it"]

    def write_set(self, saes: Iterable[Shared], folder: Path) -> None:
        """Write transcoders of different layers, none of which is refused, as one set, whole or not at all."""
        with fill_folder(folder, last=CONFIG) as temporary:
            for sae in saes:
                write_tensors(temporary / f"layer_{layer_of(sae) or 0}.safetensors", _tensors(sae))
                write_whole(temporary / CONFIG, _config(sae))
            sync(temporary / CONFIG)
        forget_card(folder)

    def recognises(self, place: Path) -> bool:
        return holds(folder_of(place), CONFIG) and layer_file(place) is not None

    def read(self, place: Path, given: Given = NOTHING_GIVEN) -> Shared:
        file = layer_file(place) or place
        config = with_given(_read_yaml(folder_of(place) / CONFIG), given)
        wanted(config, folder_of(place) / CONFIG, model_kind=("transcoder_set",))
        tensors = read_safetensors(file)
        names = {"W_enc": "W_enc", "W_dec": "W_dec", "b_enc": "b_enc", "b_dec": "b_dec"}
        names |= {"threshold": _THRESHOLD} if _THRESHOLD in tensors else {}
        names |= {"W_skip": "W_skip"} if "W_skip" in tensors else {}
        weights = taken(tensors, names, file, transposed=("W_enc",))
        form = "jumprelu" if "threshold" in weights else "standard"
        name = saelens_name(form, is_transcoder=True, has_skip="W_skip" in weights)
        facts = _origin(config, int(file.stem.removeprefix("layer_")))
        # circuit-tracer passes negative activations where a threshold is below 0; `checked` refuses such thresholds.
        sae = checked(Shared({"architecture": name}, weights, facts, is_transcoder=True), file)
        return converted(sae, file)


def layer_file(place: Path) -> Path | None:
    """Return the file of a layer: the path itself, or the only such file in a folder; None if there is no such file."""
    files = place.glob("layer_*.safetensors") if place.is_dir() else [place]
    layers = [one for one in files if LAYER_FILE.fullmatch(one.name) and is_plain_file(one)]
    return layers[0] if len(layers) == 1 else None


def _read_yaml(file: Path) -> dict[str, Any]:
    """Return the top-level strings of a YAML file; the settings of a set have nothing else."""
    lines = (_SETTING.fullmatch(line) for line in read_text(file).splitlines())
    return {match[1]: match[2].strip().strip("\"'") for match in lines if match}


def _origin(config: dict[str, Any], layer: int) -> dict[str, Any]:
    places = {"hook_name": config.get("feature_input_hook"), "hook_name_out": config.get("feature_output_hook")}
    named = {name: f"blocks.{layer}.{site}" for name, site in places.items() if isinstance(site, str) and site}
    return origin_of({"model_name": config.get("model_name"), "hook_layer": layer, **named})


class Member(NamedTuple):
    """What transcoders must agree on to be a set, all but the layer."""

    layer: int | None
    d_in: int
    d_sae: int
    has_skip: bool
    config: str


def member_of(sae: Shared) -> Member:
    """Return what counts of a transcoder for its set."""
    return Member(layer_of(sae), sae.d_in, sae.d_sae, sae.has_skip, _config(sae))


def refusal_of_set(members: Sequence[Member]) -> str | None:
    """Return why transcoders cannot be one set; None where they can."""
    layers = [one.layer for one in members]
    if None in layers:
        return f"the data of transcoder {layers.index(None) + 1} does not tell its layer; export it alone and rename it"
    if twice := [layer for layer in layers if layers.count(layer) > 1]:
        return f"several transcoders are of layer {twice[0]}; name one run for each layer"
    for name in ("d_in", "d_sae", "has_skip"):
        if len(values := {getattr(one, name) for one in members}) > 1:
            listed = " and ".join(map(str, sorted(values)))
            return f"circuit-tracer takes transcoders of one kind as a set, and {name} is {listed}"
    if len({one.config for one in members}) > 1:
        return "the transcoders are of different models or places of their layers; name runs on one model's MLPs"
    return None


def layer_of(sae: Shared) -> int | None:
    """Return the layer that a transcoder reads, a part of its file's name; None where nobody knows."""
    layer = sae.metadata.get("hook_layer")
    return layer if isinstance(layer, int) and layer >= 0 else None


def _tensors(sae: Shared) -> dict[str, Tensor]:
    # Rows are latents in both matrices.
    tensors = {name: sae.weights[name] for name in ("W_dec", "b_enc", "b_dec")}
    tensors["W_enc"] = sae.weights["W_enc"].T
    if sae.has_skip:
        tensors["W_skip"] = sae.weights["W_skip"]
    if "threshold" in sae.weights:
        tensors[_THRESHOLD] = sae.weights["threshold"]
    return tensors


def _config(sae: Shared) -> str:
    """Return the set's settings; texts in JSON are texts in YAML."""
    facts = sae.metadata
    settings = {
        "model_kind": "transcoder_set",
        "model_name": facts.get("model_name", ""),
        "feature_input_hook": _site(facts.get("hook_name")),
        "feature_output_hook": _site(facts.get("hook_name_out")),
        "scan": "",
    }
    return "".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items())


def _site(hook: object) -> str:
    """Return a hook without its layer, as TransformerLens names it inside a block: "mlp.hook_in"."""
    text = str(hook or "")
    return text.split(".", 2)[2] if text.startswith("blocks.") and text.count(".") > 1 else text

"""circuit-tracer: a layer of a transcoder set, `layer_N.safetensors`, and the set's `config.yaml`."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.checkpoints.atomic_folder import fill_folder, sync, write_tensors
from trainer.contract.files import write_whole
from trainer.sharing.base import Format, Shared, forget_card

CONFIG = "config.yaml"


class CircuitTracer(Format):
    """Holds transcoders of one width with a ReLU or a threshold; the files of all layers together make a set."""

    files = (CONFIG, "layer_*.safetensors")

    def refusal(self, sae: Shared) -> str | None:
        if not sae.is_transcoder:
            return "circuit-tracer takes transcoders, and this is an SAE; train one with data.target_path"
        if sae.d_in != sae.d_out:
            return f"circuit-tracer knows one width only, and this maps {sae.d_in} dimensions to {sae.d_out}"
        if sae.form not in ("standard", "jumprelu"):
            return f"circuit-tracer knows a ReLU or a threshold, and this is exported as {sae.architecture}"
        return None

    def write(self, sae: Shared, folder: Path) -> list[str]:
        layer = sae.metadata.get("hook_layer")
        # It is a part of a file's name.
        layer = layer if isinstance(layer, int) and layer >= 0 else None
        # Rows are latents in both matrices.
        tensors = {name: sae.weights[name] for name in ("W_dec", "b_enc", "b_dec")}
        tensors["W_enc"] = sae.weights["W_enc"].T
        if sae.has_skip:
            tensors["W_skip"] = sae.weights["W_skip"]
        if "threshold" in sae.weights:
            tensors["activation_function.threshold"] = sae.weights["threshold"]
        with fill_folder(folder, last=CONFIG) as temporary:
            write_tensors(temporary / f"layer_{layer or 0}.safetensors", tensors)
            write_whole(temporary / CONFIG, _config(sae))
            sync(temporary / CONFIG)
        forget_card(folder)
        return [] if layer is not None else ["the data does not tell its layer: rename layer_0.safetensors after it"]


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

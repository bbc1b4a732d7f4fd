"""Neuronpedia's format: `batch-N.json` with latent dashboards in SAEDashboard's format, based on `eval`'s results.

`explanations` has the names of latents and the descriptions that `sae-tui explain` has stored, in the format of
Neuronpedia's exports.
"""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from trainer.checkpoints.atomic_folder import fill_folder
from trainer.contract.files import write_whole
from trainer.contract.printable import on_one_line
from trainer.contract.runs.explanations import Explanation
from trainer.contract.runs.features import ActivatingExample, Feature, Features, LogitChange
from trainer.contract.wording import plural
from trainer.sharing.base import Format, SharedSae, refusal_of_several_hooks

# SAEDashboard's batch size.
LATENTS_IN_A_BATCH = 128
# The folder for explanations in Neuronpedia's exports, which its admin panel imports.
EXPLANATIONS = "explanations"
# The values of SAEDashboard's bin fields for a top-activating example, which belongs to no bin.
_STRONGEST = {"bin_min": -1.0, "bin_max": 99.0, "bin_contains": -1.0}


class Neuronpedia(Format):
    """Stores firing latents' max-activating examples, directions and names, but not the SAE itself."""

    files = ("batch-*.json", f"{EXPLANATIONS}*", "batch-*.jsonl.gz")
    has_labels = False

    def refusal(self, sae: SharedSae) -> str | None:
        if reason := refusal_of_several_hooks(sae, "neuronpedia"):
            return reason
        if sae.features is None or not sae.features.is_file():
            return "neuronpedia shows max-activating examples, but `sae-train eval` has stored none here"
        if Features(sae.features).n_latents != sae.d_sae:
            reason = f"{sae.features} belongs to another SAE; run eval again"
            return f"neuronpedia shows max-activating examples, but {reason}"
        return None

    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        assert sae.features is not None
        features = Features(sae.features)
        latents = features.order("latent")
        batches = [latents[first : first + LATENTS_IN_A_BATCH] for first in range(0, len(latents), LATENTS_IN_A_BATCH)]
        names = [f"batch-{number}.json" for number in range(len(batches))]
        with fill_folder(folder, last="") as temporary:
            for name, batch in zip(names, batches, strict=True):
                write_whole(temporary / name, msgspec.json.encode(_batch(sae, features, batch)))
        for stale in {*folder.glob("batch-*.json")} - {folder / name for name in names}:
            stale.unlink(missing_ok=True)
        left_out = _write_explanations(sae, features, folder / EXPLANATIONS)
        has_logits = any(features.feature(latent).promoted for latent in latents[:1])
        notes = [] if has_logits else ["logits are left out, since they require `sae-train eval` with --model"]
        return [*notes, *left_out]


def _write_explanations(sae: SharedSae, features: Features, folder: Path) -> list[str]:
    """Write latents' names and descriptions in the format of Neuronpedia's exported explanations.

    Names are from the user, and descriptions from a language model. Return sentences about names that are left out.
    """
    latents = [features.feature(latent) for latent in features.order("latent")]
    named = [feature for feature in latents if feature.name]
    current = [feature for feature in named if feature.noted_at_tokens is None]
    rows = [_row(sae, feature.latent, on_one_line(feature.name)) for feature in current]
    rows += [_described(sae, one.explanation) for one in latents if one.explanation and one.explanation.text]
    name = "batch-0.jsonl.gz"
    if rows:
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        with fill_folder(folder, last="") as temporary:
            # Without a time in its header, the file depends only on its content.
            write_whole(temporary / name, gzip.compress(lines, mtime=0))
    else:
        (folder / name).unlink(missing_ok=True)
    n_old = len(named) - len(current)
    return [f"{plural(n_old, 'name')} given to other weights left out"] if n_old else []


def _described(sae: SharedSae, one: Explanation) -> dict[str, Any]:
    """Return a row for a language model's description; its notes have the prompts and the scores."""
    scores = {"detection": one.detection, "fuzzing": one.fuzzing}
    known = [f"{name} {score:.3f}" for name, score in scores.items() if score is not None]
    notes = ", ".join([f"sae-tui explain, prompts {one.prompts}", *known])
    return _row(sae, one.latent, one.text, one.model) | {"notes": notes}


def _row(sae: SharedSae, latent: int, description: str, model_name: str | None = None) -> dict[str, Any]:
    """Return a row of Neuronpedia's table `Explanation`, whose author is unknown here.

    The type is null, because Neuronpedia accepts only the methods that it knows.
    """
    model, layer, sae_set = _ids(sae)
    source, index = f"{layer}-{sae_set}", str(latent)
    return {
        "id": hashlib.sha256("\0".join([model, source, index, model_name or ""]).encode()).hexdigest()[:25],
        "modelId": model,
        "layer": source,
        "index": index,
        "description": description,
        "authorId": "",
        "typeName": None,
        "explanationModelName": model_name,
    }


def _ids(sae: SharedSae) -> tuple[str, Any, str]:
    """Return the model, the layer and the set of SAEs. Neuronpedia has its own names for them."""
    facts = sae.metadata
    return str(facts.get("model_name", "")), facts.get("hook_layer", 0), str(facts.get("hook_name", ""))


def _batch(sae: SharedSae, features: Features, latents: list[int]) -> dict[str, Any]:
    """Return a NeuronpediaDashboardBatch."""
    model, layer, sae_set = _ids(sae)
    return {
        "model_id": model,
        "layer": layer,
        "sae_set": sae_set,
        "sae_id_suffix": None,
        "features": [_dashboard(sae, features, features.feature(latent)) for latent in latents],
    }


def _dashboard(sae: SharedSae, features: Features, feature: Feature) -> dict[str, Any]:
    """Return a NeuronpediaDashboardFeature; fields omitted here have defaults in SAEDashboard."""
    size = sae.metadata.get("context_size")
    n_tokens = size if isinstance(size, int) and size > 0 else 0
    width = feature.largest / max(1, len(feature.histogram))
    return {
        "feature_index": feature.latent,
        "frac_nonzero": feature.density,
        "freq_hist_data_bar_values": [width * (number + 0.5) for number in range(len(feature.histogram))],
        "freq_hist_data_bar_heights": [float(count) for count in feature.histogram],
        "n_prompts_total": features.n_rows // n_tokens if n_tokens else 0,
        "n_tokens_in_prompt": n_tokens,
        "dataset": str(sae.metadata.get("dataset_path", "")),
        "activations": [_activation(context) for context in feature.contexts],
        "vector": sae.weights["W_dec"][feature.latent].tolist(),
        **_moved("pos", feature.promoted),
        **_moved("neg", feature.suppressed),
    }


def _moved(sign: str, tokens: tuple[LogitChange, ...]) -> dict[str, Any]:
    """Return the tokens that a latent promotes or suppresses most, strongest first; {} if unknown."""
    if not tokens:
        return {}
    return {f"{sign}_str": [token.text for token in tokens], f"{sign}_values": [token.logit for token in tokens]}


def _activation(context: ActivatingExample) -> dict[str, Any]:
    return {
        **_STRONGEST,
        "tokens": [token.text for token in context.tokens],
        "values": [token.act for token in context.tokens],
        "qualifying_token_index": context.at,
    }

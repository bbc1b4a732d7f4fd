"""Neuronpedia's format: `batch-N.json` with latent dashboards in SAEDashboard's format, based on `eval`'s results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from trainer.checkpoints.atomic_folder import fill_folder
from trainer.contract.files import write_whole
from trainer.contract.runs.features import ActivatingExample, Feature, Features, LogitChange
from trainer.sharing.base import Format, SharedSae, refusal_of_several_hooks

# SAEDashboard's batch size.
LATENTS_IN_A_BATCH = 128
# The values of SAEDashboard's bin fields for a top-activating example, which belongs to no bin.
_STRONGEST = {"bin_min": -1.0, "bin_max": 99.0, "bin_contains": -1.0}


class Neuronpedia(Format):
    """Stores firing latents' max-activating examples and decoder directions, but not the SAE itself."""

    files = ("batch-*.json",)

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
        for stale in set(folder.glob("batch-*.json")) - {folder / name for name in names}:
            stale.unlink(missing_ok=True)
        has_logits = any(features.feature(latent).promoted for latent in latents[:1])
        return [] if has_logits else ["logits are left out, since they require `sae-train eval` with --model"]


def _batch(sae: SharedSae, features: Features, latents: list[int]) -> dict[str, Any]:
    """Return a NeuronpediaDashboardBatch."""
    return {
        "model_id": str(sae.metadata.get("model_name", "")),
        "layer": sae.metadata.get("hook_layer", 0),
        "sae_set": str(sae.metadata.get("hook_name", "")),
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

"""EleutherAI's sparsify: `cfg.json` and `sae.safetensors`, for TopK of one width; what it does not know it skips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.checkpoints.atomic_folder import fill_folder, write_json, write_tensors
from trainer.contract.errors import UserError
from trainer.sharing.base import Format, Shared, forget_card
from trainer.sharing.reading import checked, holds, read_config, read_safetensors, taken, wanted

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"


class Sparsify(Format):
    """Holds TopK SAEs, and of transcoders those whose target is as wide as their input."""

    files = (CONFIG, WEIGHTS)

    def refusal(self, sae: Shared) -> str | None:
        if sae.form != "topk":
            return f"sparsify knows TopK only, and this SAE is exported as {sae.architecture}"
        if sae.d_out != sae.d_in:
            return f"sparsify knows one width only, and this maps {sae.d_in} dimensions to {sae.d_out}"
        return None

    def write(self, sae: Shared, folder: Path) -> list[str]:
        renamed = {
            # Its encoder is an nn.Linear.
            "encoder.weight": sae.weights["W_enc"].T,
            "encoder.bias": sae.weights["b_enc"],
            "W_dec": sae.weights["W_dec"],
            "b_dec": sae.weights["b_dec"],
            **({"W_skip": sae.weights["W_skip"]} if sae.has_skip else {}),
        }
        with fill_folder(folder, last=CONFIG) as temporary:
            write_tensors(temporary / WEIGHTS, renamed)
            write_json(temporary / CONFIG, _config(sae))
        forget_card(folder)
        return []

    def recognises(self, folder: Path) -> bool:
        return holds(folder, CONFIG, WEIGHTS)

    def read(self, folder: Path) -> Shared:
        config, file = read_config(folder / CONFIG), folder / WEIGHTS
        is_transcoder = config.get("transcode") is True
        # The input of an SAE, from which b_dec is taken, goes around it as it is: no architecture here does that.
        skips = (False, True) if is_transcoder else (False,)
        wanted(config, folder / CONFIG, activation=("topk",), transcode=(False, True), skip_connection=skips)
        names = {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "W_dec": "W_dec", "b_dec": "b_dec"}
        names |= {"W_skip": "W_skip"} if config.get("skip_connection") else {}
        weights = taken(read_safetensors(file), names, file)
        if weights["W_enc"].dim() != 2:
            raise UserError(f"{file}: encoder.weight is no matrix of weights")
        weights["W_enc"] = weights["W_enc"].T
        k, metadata = config.get("k"), config.get("metadata")
        kind = ("_skip" if "W_skip" in weights else "") + "_transcoder" if is_transcoder else ""
        own, facts = {"architecture": f"topk{kind}", "k": k}, metadata if isinstance(metadata, dict) else {}
        sae = Shared(own, weights, {"training_architecture": "topk", **facts}, k=k, is_transcoder=is_transcoder)
        return checked(sae, file)


def _config(sae: Shared) -> dict[str, Any]:
    return {
        "activation": "topk",
        # Not read where num_latents is given; a whole number all the same.
        "expansion_factor": max(1, sae.d_sae // sae.d_in),
        "normalize_decoder": sae.unit_decoder,
        "num_latents": sae.d_sae,
        "k": sae.config["k"],
        "multi_topk": False,
        "skip_connection": sae.has_skip,
        "transcode": sae.is_transcoder,
        "d_in": sae.d_in,
        # It reads the settings that it knows, and drops the rest.
        "metadata": sae.metadata,
    }

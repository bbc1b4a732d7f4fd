"""EleutherAI's sparsify format, for TopK SAEs and transcoders with d_in = d_out: `cfg.json`, `sae.safetensors`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from trainer.checkpoints.atomic_folder import fill_folder, write_json, write_tensors
from trainer.contract.errors import UsageError, UserError
from trainer.saes.base import saelens_name
from trainer.sharing.base import (
    NOTHING_GIVEN,
    Format,
    Given,
    SharedSae,
    folder_of,
    forget_card,
    refusal_of_several_hooks,
)
from trainer.sharing.origins import cleaned, of_module, origin_of
from trainer.sharing.reading import (
    checked,
    converted,
    read_config,
    read_safetensors,
    table,
    taken,
    wanted,
    without_input_bias,
)

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"


class Sparsify(Format):
    """Stores TopK SAEs, and TopK transcoders with d_in = d_out."""

    files = (CONFIG, WEIGHTS)
    reads = ((CONFIG, WEIGHTS),)

    def refusal(self, sae: SharedSae) -> str | None:
        if reason := refusal_of_several_hooks(sae, "sparsify"):
            return reason
        if sae.form != "topk":
            return f"sparsify supports only TopK, but this SAE is exported as {sae.architecture}"
        if sae.d_out != sae.d_in:
            return f"sparsify needs d_out = d_in, but this maps {sae.d_in} dimensions to {sae.d_out}"
        return None

    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        renamed = {
            # sparsify's encoder is an nn.Linear.
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

    def read(self, place: Path, given: Given = NOTHING_GIVEN) -> SharedSae:
        folder = folder_of(place)
        config, file = read_config(folder / CONFIG, given), folder / WEIGHTS
        _refuse_others(config, folder / CONFIG, given)
        is_transcoder = config.get("transcode") is True or given.transcoder
        names = {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "W_dec": "W_dec", "b_dec": "b_dec"}
        names |= {"W_skip": "W_skip"} if config.get("skip_connection") else {}
        weights = taken(read_safetensors(file), names, file, transposed=("W_enc",))
        k, name = config.get("k"), saelens_name("topk", is_transcoder=is_transcoder, has_skip="W_skip" in weights)
        origin = _origin(folder, is_transcoder=is_transcoder)
        facts = {"training_architecture": "topk", **origin, **cleaned(table(config, "metadata"))}
        own = {"architecture": name, "k": k}
        sae = checked(SharedSae(own, weights, facts, k=k, is_transcoder=is_transcoder), file)
        if is_transcoder and config.get("transcode") is not True:
            # Before sparsify had the setting `transcode`, its transcoders also encoded x − b_dec.
            sae = sae._replace(weights=without_input_bias(weights))
        return converted(sae, file)


def _refuse_others(config: dict[str, Any], file: Path, given: Given) -> None:
    wanted(config, file, activation=("topk",), transcode=(False, True), signed=(False, None))
    skips = config.get("skip_connection")
    if skips and config.get("transcode") is not True and not given.transcoder:
        # In a sparsify SAE, the skip connection reads x but the encoder reads x − b_dec; none of our architectures
        # computes this.
        raise UsageError(
            f"{file}: skip_connection is {str(skips)[:60]!r} but transcode is not, and SAEs with a skip connection are "
            f"not supported; if it is a transcoder, add --transcoder"
        )
    wanted(config, file, skip_connection=(False, True, None))


def _origin(folder: Path, *, is_transcoder: bool) -> dict[str, Any]:
    """Return an SAE's origin: the hook from a folder name, and the rest from the run's settings in a parent folder."""
    above = folder.absolute().parts[:-4:-1]
    place = next((found for name in above if (found := of_module(name, is_transcoder=is_transcoder))), {})
    run: dict[str, Any] = {}
    for parent in (folder.parent, folder.parent.parent):
        with contextlib.suppress(UserError):
            run = run or read_config(parent / "config.json")
    # A run's settings contain "model"; a language model's config.json does not.
    if not isinstance(run.get("model"), str):
        return place
    facts = {"model_name": run["model"], "dataset_path": run.get("dataset"), "context_size": run.get("ctx_len")}
    return origin_of(facts | place)


def _config(sae: SharedSae) -> dict[str, Any]:
    return {
        "activation": "topk",
        # sparsify ignores this if num_latents is given, but requires an integer.
        "expansion_factor": max(1, sae.d_sae // sae.d_in),
        "normalize_decoder": sae.unit_decoder,
        "num_latents": sae.d_sae,
        "k": sae.config["k"],
        "multi_topk": False,
        "skip_connection": sae.has_skip,
        "transcode": sae.is_transcoder,
        "d_in": sae.d_in,
        # sparsify ignores unknown settings.
        "metadata": sae.metadata,
    }

"""SAELens' format, `cfg.json` and `sae_weights.safetensors`, which runs use unless SAELens lacks the architecture."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trainer.activations.side_by_side import JOINED
from trainer.checkpoints.atomic_folder import fill_folder, write_json, write_tensors
from trainer.contract.printable import printable
from trainer.contract.wording import join_words
from trainer.saes.base import Sae
from trainer.sharing import saelens_reading
from trainer.sharing.base import NOTHING_GIVEN, Format, Given, SharedSae, folder_of, forget_card, shared_form
from trainer.sharing.origins import layer_of
from trainer.sharing.parts import PARTS, origins_of_parts
from trainer.sharing.saelens_reading import ARCHITECTURES, ORIGINAL
from trainer.sharing.sparsify import Sparsify

# The SAELens version that exported files are tested with; SAELens uses the version in a file to decide how to convert
# it.
SAE_LENS_VERSION = "6.54.12"
CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
# Models commonly used with SAEs, under their hub names in TransformerLens, which does not recognise
# "openai-community/gpt2". Exports for other models set model_class_name to AutoModelForCausalLM, and use the module's
# name as the hook.
TRANSFORMER_LENS_MODELS = frozenset(
    [
        "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "EleutherAI/gpt-neo-125M", "EleutherAI/gpt-j-6B",
        "EleutherAI/pythia-14m", "EleutherAI/pythia-31m", "EleutherAI/pythia-70m", "EleutherAI/pythia-160m",
        "EleutherAI/pythia-410m", "EleutherAI/pythia-1b", "EleutherAI/pythia-1.4b", "EleutherAI/pythia-2.8b",
        "EleutherAI/pythia-6.9b", "EleutherAI/pythia-12b", "EleutherAI/pythia-70m-deduped",
        "EleutherAI/pythia-160m-deduped", "EleutherAI/pythia-410m-deduped", "EleutherAI/pythia-1b-deduped",
        "EleutherAI/pythia-1.4b-deduped", "EleutherAI/pythia-2.8b-deduped", "EleutherAI/pythia-6.9b-deduped",
        "EleutherAI/pythia-12b-deduped", "google/gemma-2b", "google/gemma-2b-it", "google/gemma-7b",
        "google/gemma-7b-it", "google/gemma-2-2b", "google/gemma-2-2b-it", "google/gemma-2-9b", "google/gemma-2-9b-it",
        "google/gemma-2-27b", "google/gemma-2-27b-it", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B",
        "meta-llama/Llama-3.2-3B-Instruct", "meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B-Instruct",
        "mistralai/Mistral-7B-v0.1", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B",
        "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct",
        "roneneldan/TinyStories-1M", "roneneldan/TinyStories-33M",
    ]
)  # fmt: skip
# Matches the hooks that TransformerLens provides in every block of these models. It has no hook at the MLP input that
# circuit-tracer uses.
_ITS_HOOK = re.compile(r"blocks\.[0-9]+\.hook_(resid_pre|resid_post|mlp_out|attn_out)")


class SaeLens(Format):
    """Stores SAEs and transcoders of all architectures that we train, except TopK transcoders, with metadata."""

    files = (CONFIG, WEIGHTS)
    reads = ((CONFIG, WEIGHTS),)

    def refusal(self, sae: SharedSae) -> str | None:
        if sae.architecture in ARCHITECTURES:
            return None
        if sae.form == "topk":
            return "SAELens has no TopK transcoders; use --format sparsify, or train with batch_topk"
        name = printable(sae.architecture)
        return f"SAELens has no architecture {name}; export_config must name one of {join_words([*ARCHITECTURES])}"

    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        with fill_folder(folder, last=CONFIG) as temporary:
            write_tensors(temporary / WEIGHTS, sae.weights)
            write_json(temporary / CONFIG, _config(sae))
        forget_card(folder)
        is_gguf = str(sae.metadata.get("model_name")).endswith(".gguf")
        notes = ["SAELens loads a GGUF model only with its tokenizer files next to it"] if is_gguf else []
        of_layer = ["SAELens reads a layer of a cross-layer transcoder as a transcoder to all later outputs, joined"]
        return [*notes, *(of_layer if sae.layer else [])]

    def read(self, place: Path, given: Given = NOTHING_GIVEN) -> SharedSae:
        return saelens_reading.read(folder_of(place), (CONFIG, WEIGHTS), given)


def export_sae(sae: Sae, folder: Path, metadata: dict[str, Any]) -> None:
    """Write a run's SAE in SAELens' format, or in sparsify's format if only sparsify supports it.

    An SAE that neither supports is also written in SAELens' format, which keeps its weights. Each file is written
    atomically, and unrelated files in the folder are kept. Raise `UserError` on failure.
    """
    shared = shared_form(sae, metadata)
    only_sparsify = SaeLens().refusal(shared) is not None and Sparsify().refusal(shared) is None
    (Sparsify() if only_sparsify else SaeLens()).write(shared, folder)


def origin(meta: dict[str, Any]) -> dict[str, Any]:
    """Return the origin of activations from the content of their meta.json, with SAELens' field names."""
    hook = meta.get("hook_name")
    before = meta.get("tokens_before_text")
    parts = meta.get(JOINED)
    facts = {
        "model_name": meta.get("model_name", meta.get("model")),
        "hook_name": hook,
        "hook_layer": layer_of(hook),
        "hook_name_out": meta.get("hook_name_out"),
        "module": meta.get("output_module"),
        "module_out": meta.get("output_module_out"),
        "context_size": meta.get("context_size"),
        "dataset_path": meta.get("dataset_path", meta.get("text")),
        "prepend_bos": None if before is None else bool(before),
        "exclude_special_tokens": meta.get("special_tokens_dropped"),
        PARTS: origins_of_parts(parts) if parts else None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _config(sae: SharedSae) -> dict[str, Any]:
    return {
        **sae.config,
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "dtype": "float32",
        "device": "cpu",
        **({"d_out": sae.d_out} if sae.is_transcoder else {}),
        "apply_b_dec_to_input": not sae.is_transcoder,
        "normalize_activations": "none",
        # SAELens has a separate axis for the heads at hook_z, while our rows concatenate the heads.
        "reshape_activations": "hook_z" if _hook_of(sae).endswith("hook_z") else "none",
        "metadata": {"sae_lens_version": SAE_LENS_VERSION, **sae.metadata, **_loading(sae.metadata)},
    }


def _hook_of(sae: SharedSae) -> str:
    """Return the hook of an SAE, or "" for a crosscoder, which has several."""
    return "" if sae.parts else str(sae.metadata.get("hook_name"))


def _loading(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that SAELens needs to load the model and find the hook; {} for a crosscoder's hooks."""
    if PARTS in facts:
        return {}
    if "module" in facts and not _is_in_transformer_lens(facts):
        return _by_transformers(facts)
    if "hook_layer" in facts:
        return {"model_class_name": "HookedTransformer", "model_from_pretrained_kwargs": {}}
    return {}


def _is_in_transformer_lens(facts: dict[str, Any]) -> bool:
    hooks = [facts[name] for name in ("hook_name", "hook_name_out") if name in facts]
    return facts.get("model_name") in TRANSFORMER_LENS_MODELS and all(_ITS_HOOK.fullmatch(str(one)) for one in hooks)


def _by_transformers(facts: dict[str, Any]) -> dict[str, Any]:
    """Return metadata for loading the model with transformers, where a hook is a module's output.

    The replaced values are kept under the key `ORIGINAL`.
    """
    model = Path(str(facts.get("model_name", "")))
    of_gguf = {"model_name": str(model.parent)} if model.suffix == ".gguf" else {}
    its_own = of_gguf | {"hook_name": facts["module"]}
    its_own |= {"hook_name_out": facts["module_out"]} if "module_out" in facts else {}
    return {
        "model_class_name": "AutoModelForCausalLM",
        "model_from_pretrained_kwargs": {"gguf_file": model.name} if of_gguf else {},
        **its_own,
        ORIGINAL: {name: facts[name] for name in its_own if name in facts},
    }

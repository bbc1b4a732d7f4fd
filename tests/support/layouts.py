"""The file formats in which other tools store SAEs, each with a reference implementation of the SAE.

Every builder writes files with random weights, in the format described in the tool's documentation or code.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor

D_IN, D_SAE, K = 12, 40, 4
PLACE = {"model_name": "gpt2-small", "hook_name": "blocks.3.hook_resid_pre", "hook_layer": 3}
# The settings written by SAELens 3 to 5.
FLAT = {
    "d_in": D_IN, "d_sae": D_SAE, "dtype": "torch.float32", "device": "cpu", "model_name": "gpt2-small",
    "hook_name": "blocks.3.hook_resid_pre", "hook_layer": 3, "hook_head_index": None, "context_size": 128,
    "prepend_bos": True, "dataset_path": "Skylion007/openwebtext", "dataset_trust_remote_code": True,
    "apply_b_dec_to_input": True, "normalize_activations": "none", "finetuning_scaling_factor": False,
    "activation_fn_str": "relu", "activation_fn_kwargs": {}, "sae_lens_training_version": "3.0.0",
    "neuronpedia_id": None, "model_from_pretrained_kwargs": {},
}  # fmt: skip
ALL_FLAT = PLACE | {"context_size": 128, "prepend_bos": True, "dataset_path": "Skylion007/openwebtext"}
# The settings written by SAELens 1 and 2, including the training settings.
OLDEST = {name: value for name, value in FLAT.items() if not name.startswith(("hook_", "activation_fn"))} | {
    "hook_point": "blocks.{layer}.hook_resid_pre", "hook_point_layer": 3, "use_ghost_grads": True, "noise_scale": 0,
    "l1_coefficient": 8e-5, "normalize_sae_decoder": True, "mse_loss_normalization": None, "lr": 4e-4,
    "scale_sparsity_penalty_by_decoder_norm": False, "b_dec_init_method": "mean", "dead_feature_threshold": 1e-8,
}  # fmt: skip
NEWEST = {
    "d_in": D_IN, "d_sae": D_SAE, "dtype": "float32", "device": "cpu", "apply_b_dec_to_input": True,
    "normalize_activations": "none", "reshape_activations": "none",
    "metadata": {"sae_lens_version": "6.20.0", **ALL_FLAT},
}  # fmt: skip
TRANSCODER = NEWEST | {"d_out": D_IN, "apply_b_dec_to_input": False}


class Reference(NamedTuple):
    """Computes another tool's SAE in float64, as that tool defines it. `weights` uses SAELens's tensor names.

    With `subtracts`, the encoder reads x − b_dec. With `by_norm`, latents are scaled by the norms of their decoder
    rows. Rows are multiplied by `row_scale`, and activations by `decoder_scale` [d_sae] before they are decoded.
    """

    kind: str
    weights: dict[str, Tensor]
    k: int = K
    subtracts: bool = True
    by_norm: bool = False
    row_scale: float = 1.0
    decoder_scale: Tensor | None = None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return activations, reconstructions and a mask of the rows whose active latents do not depend on rounding."""
        own = {name: tensor.double() for name, tensor in self.weights.items()}
        rows = x.double() * self.row_scale
        seen = rows - own["b_dec"] if self.subtracts else rows
        acts, clear = self._encoded(seen @ own["W_enc"], own)
        decoder = own["W_dec"] if self.decoder_scale is None else own["W_dec"] * self.decoder_scale.double()[:, None]
        values = acts / own["W_dec"].norm(dim=1) if self.by_norm else acts
        x_hat = values @ decoder + own["b_dec"]
        if "W_skip" in own:
            x_hat = x_hat + rows @ own["W_skip"].T
        # With `by_norm`, undo the scaling of the rows in the activations.
        return acts / (self.row_scale if self.by_norm else 1.0), x_hat / self.row_scale, clear

    def _encoded(self, product: Tensor, own: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        if self.kind == "gated":
            gate = product + own["b_gate"]
            magnitude = (product * own["r_mag"].exp() + own["b_mag"]).relu()
            return magnitude * (gate > 0), _clear(gate)
        pre = (product + own["b_enc"]) * (own["W_dec"].norm(dim=1) if self.by_norm else 1.0)
        if self.kind == "jumprelu":
            return pre.relu() * (pre > own["threshold"]), _clear(pre - own["threshold"])
        if self.kind == "topk":
            ordered = pre.sort(dim=1, descending=True).values
            top = pre.topk(self.k, dim=1)
            acts = torch.zeros_like(pre).scatter(1, top.indices, top.values.relu())
            return acts, ordered[:, self.k - 1] - ordered[:, self.k] > 1e-4
        return pre.relu(), torch.ones(len(pre), dtype=torch.bool)


def _clear(distances: Tensor) -> Tensor:
    return distances.abs().min(dim=1).values > 1e-4


class Layout(NamedTuple):
    """How a tool stores an SAE. `write` writes the files to a folder and returns the reference.

    `origin` is the metadata in the files, `place` is the SAE's path under the folder, and `flags` are the options that
    a user has to add. `oracle` names the other tool's loader for these files.
    """

    form: str
    write: Callable[[Path], Reference]
    origin: dict[str, Any]
    oracle: str = ""
    place: str = "."
    flags: tuple[str, ...] = ()


def tensors(kind: str = "standard", d_out: int = D_IN, *, skip: bool = False) -> dict[str, Tensor]:
    """Return random weights with SAELens's tensor names."""
    drawn = {"W_enc": torch.randn(D_IN, D_SAE), "W_dec": torch.randn(D_SAE, d_out), "b_dec": torch.randn(d_out)}
    drawn["W_dec"] *= 0.5 + torch.rand(D_SAE, 1)
    if kind == "gated":
        drawn |= {name: 0.3 * torch.randn(D_SAE) for name in ("b_gate", "b_mag", "r_mag")}
    else:
        drawn["b_enc"] = 0.3 * torch.randn(D_SAE)
    if kind == "jumprelu":
        # A negative threshold has the same effect as 0.
        drawn["threshold"] = torch.rand(D_SAE) * 3 - 0.5
    return drawn | ({"W_skip": torch.randn(d_out, D_IN)} if skip else {})


def put(file: Path, config: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(config))


def save(file: Path, stored: dict[str, Tensor]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in stored.items()}, file)


def saelens(kind: str, config: dict[str, Any], extra: dict[str, Tensor] | None = None, **facts: Any) -> Any:
    """Return a function that writes an SAE as SAELens does; `extra` contains additional tensors."""

    def write(folder: Path) -> Reference:
        drawn = tensors(kind, skip=str(config.get("architecture")).endswith("skip_transcoder"))
        stored = {**drawn, **(extra or {})}
        if stored.pop("log_threshold", None) is not None:
            drawn["threshold"] = drawn["threshold"].abs() + 0.1
            stored["log_threshold"] = drawn["threshold"].log()
            del stored["threshold"]
        if (bar := stored.get("topk_threshold")) is not None:
            del stored["threshold"]
            drawn["threshold"] = torch.full((D_SAE,), float(bar))
        put(folder / "cfg.json", config)
        save(folder / "sae_weights.safetensors", stored)
        return Reference(kind, drawn, **facts)

    return write


def halved(kind: str, dtype: torch.dtype) -> Any:
    """Return a function that writes an SAE as SAELens does, with 16-bit tensors."""

    def write(folder: Path) -> Reference:
        drawn = {name: tensor.to(dtype) for name, tensor in tensors(kind).items()}
        put(folder / "cfg.json", NEWEST | {"architecture": kind, "k": K})
        save(folder / "sae_weights.safetensors", drawn)
        return Reference(kind, drawn)

    return write


FACTOR = 0.5 + torch.rand(D_SAE, generator=torch.Generator().manual_seed(3))
SAELENS = {
    "1: hook_point and a scaling_factor of ones": Layout(
        "saelens", saelens("standard", OLDEST, {"scaling_factor": torch.ones(D_SAE)}), ALL_FLAT, "sae_lens"
    ),
    "2: a scaling_factor used for fine-tuning": Layout(
        "saelens",
        saelens(
            "standard", OLDEST | {"finetuning_scaling_factor": True}, {"scaling_factor": FACTOR}, decoder_scale=FACTOR
        ),
        ALL_FLAT,
    ),
    "2: an unused scaling_factor": Layout("saelens", saelens("standard", OLDEST, {"scaling_factor": FACTOR}), ALL_FLAT),
    "3: an encoder of x": Layout(
        "saelens",
        saelens("standard", FLAT | {"apply_b_dec_to_input": False}, subtracts=False),
        ALL_FLAT,
        "sae_lens",
    ),
    "3: normalisation as a boolean": Layout(
        "saelens", saelens("standard", FLAT | {"normalize_activations": False}), ALL_FLAT, "sae_lens"
    ),
    "3 to 5: TopK as an activation function": Layout(
        "saelens",
        saelens(
            "topk",
            FLAT | {"architecture": "standard", "activation_fn_str": "topk", "activation_fn_kwargs": {"k": K}},
        ),
        ALL_FLAT,
        "sae_lens",
    ),
    "4: activation_fn without _str": Layout(
        "saelens",
        saelens(
            "topk",
            {name: value for name, value in FLAT.items() if name != "activation_fn_str"}
            | {"activation_fn": "topk", "activation_fn_kwargs": {"k": K, "signed": False}},
        ),
        ALL_FLAT,
        "sae_lens",
    ),
    "4: gated": Layout("saelens", saelens("gated", FLAT | {"architecture": "gated"}), ALL_FLAT, "sae_lens"),
    "4: gated, an encoder of x": Layout(
        "saelens",
        saelens("gated", FLAT | {"architecture": "gated", "apply_b_dec_to_input": False}, subtracts=False),
        ALL_FLAT,
        "sae_lens",
    ),
    "5: jumprelu": Layout("saelens", saelens("jumprelu", FLAT | {"architecture": "jumprelu"}), ALL_FLAT, "sae_lens"),
    "5: jumprelu training checkpoint": Layout(
        "saelens",
        saelens("jumprelu", FLAT | {"architecture": "jumprelu"}, {"log_threshold": torch.ones(1)}),
        ALL_FLAT,
    ),
    "5: rows scaled to a mean norm": Layout(
        "saelens",
        saelens("jumprelu", FLAT | {"architecture": "jumprelu", "normalize_activations": True}, row_scale=0.37),
        ALL_FLAT,
        flags=("norm_scaling_factor=0.37",),
    ),
    "6: topk by norms": Layout(
        "saelens",
        saelens("topk", NEWEST | {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True}, by_norm=True),
        ALL_FLAT,
        "sae_lens",
    ),
    "6: rows scaled to a mean norm, topk by norms": Layout(
        "saelens",
        saelens(
            "topk",
            NEWEST
            | {"architecture": "topk", "k": K, "rescale_acts_by_decoder_norm": True}
            | {"normalize_activations": "expected_average_only_in"},
            by_norm=True,
            row_scale=0.5,
        ),
        ALL_FLAT,
        flags=("norm_scaling_factor=0.5",),
    ),
    "6: concatenated heads": Layout(
        "saelens",
        saelens(
            "standard",
            NEWEST
            | {"architecture": "standard", "reshape_activations": "hook_z"}
            | {"metadata": {"sae_lens_version": "6.1.0", "hook_name": "blocks.3.attn.hook_z"}},
        ),
        {"hook_name": "blocks.3.attn.hook_z"},
    ),
    "6: transcoder": Layout(
        "saelens",
        saelens("standard", TRANSCODER | {"architecture": "transcoder"}, subtracts=False),
        ALL_FLAT,
        "sae_lens",
    ),
    "6: skip transcoder": Layout(
        "saelens",
        saelens("standard", TRANSCODER | {"architecture": "skip_transcoder"}, subtracts=False),
        ALL_FLAT,
        "sae_lens",
    ),
    "6: jumprelu skip transcoder": Layout(
        "saelens",
        saelens("jumprelu", TRANSCODER | {"architecture": "jumprelu_skip_transcoder"}, subtracts=False),
        ALL_FLAT,
        "sae_lens",
    ),
    "6: batchtopk training checkpoint": Layout(
        "saelens",
        saelens(
            "jumprelu",
            NEWEST | {"architecture": "batchtopk", "k": K, "rescale_acts_by_decoder_norm": True},
            {"topk_threshold": torch.tensor(1.7, dtype=torch.float64)},
            by_norm=True,
        ),
        ALL_FLAT,
    ),
    "6: matryoshka_batchtopk training checkpoint": Layout(
        "saelens",
        saelens(
            "jumprelu",
            NEWEST | {"architecture": "matryoshka_batchtopk", "k": K, "matryoshka_widths": [10, 40]},
            {"topk_threshold": torch.tensor(1.7, dtype=torch.float64)},
        ),
        ALL_FLAT,
    ),
    "6: fp16": Layout("saelens", halved("topk", torch.float16), ALL_FLAT, "sae_lens"),
    "6: bf16": Layout("saelens", halved("jumprelu", torch.bfloat16), ALL_FLAT, "sae_lens"),
}


def sparsify(
    config: dict[str, Any], folder_name: str = "layers.3", *, subtracts: bool = True, bom: bool = False
) -> Any:
    """Return a function that writes a sparsify SAE to `folder_name`, and its run's settings to the parent folder."""

    def write(folder: Path) -> Reference:
        drawn = tensors("topk", skip=bool(config.get("skip_connection")))
        stored = {**drawn, "encoder.weight": drawn["W_enc"].T, "encoder.bias": drawn["b_enc"]}
        del stored["W_enc"], stored["b_enc"]
        place = folder / folder_name
        put(place / "cfg.json", {"d_in": D_IN, "k": K, "expansion_factor": 4, "normalize_decoder": True} | config)
        if bom:
            (place / "cfg.json").write_bytes(b"\xef\xbb\xbf" + (place / "cfg.json").read_bytes())
        put(folder / "config.json", {"model": "gpt2-small", "dataset": "x/y", "ctx_len": 64, "sae": config})
        save(place / "sae.safetensors", stored)
        return Reference("topk", drawn, subtracts=subtracts)

    return write


def cached(folder: Path) -> Reference:
    """Write a sparsify SAE as the hub's cache stores it: as links to blobs."""
    snapshot = folder / "models--a--b" / "snapshots" / "0123abcd"
    reference: Reference = sparsify({"num_latents": D_SAE})(snapshot)
    blobs = folder / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(file for file in snapshot.rglob("*") if file.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(Path("../" * len(file.relative_to(snapshot.parents[1]).parts[:-1])) / "blobs" / str(number))
    return reference


RUN = {"model_name": "gpt2-small", "dataset_path": "x/y", "context_size": 64}
AFTER_3 = RUN | {"hook_name": "blocks.3.hook_resid_post", "hook_layer": 3}
MLP_3 = RUN | {"hook_name": "blocks.3.mlp.hook_in", "hook_name_out": "blocks.3.hook_mlp_out", "hook_layer": 3}
MULTI = {"num_latents": D_SAE, "multi_topk": True, "activation": "topk", "skip_connection": False, "transcode": False}
SPARSIFY = {
    "1.3: multi_topk": Layout("sparsify", sparsify(MULTI), AFTER_3, "sparsify", "layers.3"),
    "2024: signed, no num_latents": Layout("sparsify", sparsify({"signed": False}, "h.3"), AFTER_3, place="h.3"),
    "a byte order mark": Layout(
        "sparsify", sparsify({"num_latents": 0}, "gpt_neox.layers.3", bom=True), AFTER_3, place="gpt_neox.layers.3"
    ),
    "1.3: skip transcoder": Layout(
        "sparsify",
        sparsify({"num_latents": D_SAE, "transcode": True, "skip_connection": True}, "layers.3.mlp", subtracts=False),
        MLP_3,
        "sparsify",
        "layers.3.mlp",
    ),
    # In sparsify versions that did not mark transcoders, a transcoder's encoder also read x − b_dec.
    "2024: skip transcoder without a mark": Layout(
        "sparsify",
        sparsify({"num_latents": D_SAE, "skip_connection": True}, "layers.3.mlp"),
        MLP_3,
        "sparsify",
        "layers.3.mlp",
        ("--transcoder",),
    ),
    "hub cache": Layout("sparsify", cached, AFTER_3, "sparsify", "models--a--b/snapshots/0123abcd/layers.3"),
}


LINEAR = {"encoder.weight": "W_enc", "encoder.bias": "b_enc", "decoder.weight": "W_dec"}
OWN = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec")}


def dictionary(
    kind: str,
    names: dict[str, str],
    trainer: dict[str, Any],
    extra: dict[str, Any] | None = None,
    file: str = "ae.pt",
    **facts: Any,
) -> Any:
    """Return a function that writes a dictionary_learning SAE; `names` maps its tensor names to SAELens's names."""

    def write(folder: Path) -> Reference:
        drawn = tensors(kind)
        if "threshold" in (extra or {}):
            drawn["threshold"] = torch.full((D_SAE,), float((extra or {})["threshold"]))
        turned = {"W_enc", "W_dec"} if any("." in name for name in names) else set()
        stored: dict[str, Any] = {
            theirs: (drawn[ours].T if ours in turned else drawn[ours]).clone().contiguous()
            for theirs, ours in names.items()
        }
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        torch.save(stored | {name: torch.as_tensor(value) for name, value in (extra or {}).items()}, folder / file)
        settings = {"activation_dim": D_IN, "dict_size": D_SAE, "lm_name": "EleutherAI/pythia-70m-deduped", "layer": 3}
        buffer = {"d_submodule": D_IN, "ctx_len": 128, "io": "out"}
        put(folder / "config.json", {"trainer": settings | trainer, "buffer": buffer})
        return Reference(kind, drawn, **facts)

    return write


GATED = {
    "encoder.weight": "W_enc", "decoder.weight": "W_dec", "decoder_bias": "b_dec", "r_mag": "r_mag",
    "gate_bias": "b_gate", "mag_bias": "b_mag",
}  # fmt: skip
TOPK = LINEAR | {"b_dec": "b_dec"}
LM = {"model_name": "EleutherAI/pythia-70m-deduped", "hook_layer": 3, "context_size": 128}
AT_3 = LM | {"hook_name": "blocks.3.hook_resid_post"}
POST = {"submodule_name": "resid_post_layer_3"}
DICTIONARIES = {
    # dictionary_learning scales decoder rows to unit norm when it loads them.
    "2024: StandardTrainer": Layout(
        "dictionary_learning",
        dictionary("standard", LINEAR | {"bias": "b_dec"}, {"trainer_class": "StandardTrainer"} | POST, by_norm=True),
        AT_3,
        "AutoEncoder",
    ),
    "2024: encoder of x": Layout(
        "dictionary_learning",
        dictionary(
            "standard", LINEAR | {"decoder.bias": "b_dec"}, {"trainer_class": "StandardTrainerNew"}, subtracts=False
        ),
        LM,
        "AutoEncoderNew",
    ),
    "2024: gated": Layout(
        "dictionary_learning",
        dictionary("gated", GATED, {"trainer_class": "GatedSAETrainer", "submodule_name": "mlp_out_layer3"}),
        LM | {"hook_name": "blocks.3.hook_mlp_out"},
        "GatedAutoEncoder",
    ),
    "2024: TopK without buffers": Layout(
        "dictionary_learning", dictionary("topk", TOPK, {"trainer_class": "TrainerTopK", "k": K} | POST), AT_3
    ),
    "2024: TopK": Layout(
        "dictionary_learning",
        dictionary("topk", TOPK, {"trainer_class": "TrainerTopK", "k": K}, {"k": K, "threshold": -1.0}),
        LM,
        "AutoEncoderTopK",
    ),
    "2024: BatchTopK": Layout(
        "dictionary_learning",
        dictionary("jumprelu", TOPK, {"trainer_class": "TrainerBatchTopK", "k": K}, {"k": K, "threshold": 1.5}),
        LM,
        "BatchTopKSAE",
    ),
    "2024: JumpReLU": Layout(
        "dictionary_learning",
        dictionary("jumprelu", OWN | {"threshold": "threshold"}, {"trainer_class": "TrainerJumpRelu"}, subtracts=False),
        LM,
        "JumpReluAutoEncoder",
    ),
    "2024: Matroyshka": Layout(
        "dictionary_learning",
        dictionary(
            "jumprelu",
            TOPK,
            {"trainer_class": "MatroyshkaBatchTopKTrainer", "dict_class": "MatroyshkaBatchTopKSAE", "k": K},
            {"k": K, "threshold": 1.5, "group_sizes": [10, 30]},
        ),
        LM,
    ),
    "2025: class name as a Python repr": Layout(
        "dictionary_learning",
        dictionary(
            "topk", TOPK, {"dict_class": "<class 'dictionary_learning.trainers.top_k.AutoEncoderTopK'>", "k": K}
        ),
        LM,
    ),
    "2025: a checkpoint": Layout(
        "dictionary_learning",
        dictionary("topk", TOPK, {"dict_class": "AutoEncoderTopK", "k": K}, {"k": K}, "checkpoints/ae_1000.pt"),
        LM,
        place="checkpoints/ae_1000.pt",
    ),
    "neither class nor trainer": Layout(
        "dictionary_learning",
        dictionary("topk", TOPK, {"k": K}, {"k": K}),
        LM,
        flags=("trainer.dict_class=AutoEncoderTopK",),
    ),
}


def scope(names: dict[str, str], *, transcoder: bool = False) -> Any:
    """Return a function that writes `params.npz`, as in Gemma Scope 1."""

    def write(folder: Path) -> Reference:
        drawn = tensors("jumprelu")
        site = "transcoders" if transcoder else "res"
        place = folder / f"gemma-scope-2b-pt-{site}" / "layer_12" / "width_16k" / "average_l0_6"
        place.mkdir(parents=True)
        arrays: dict[str, Any] = {names.get(name, name): one.numpy() for name, one in drawn.items()}
        numpy.savez(place / "params.npz", **arrays)
        return Reference("jumprelu", drawn, subtracts=False)

    return write


def scope_2(config: dict[str, Any] | None, place: str = ".", *, skip: bool = False) -> Any:
    """Return a function that writes `params.safetensors` and, if given, `config.json`, like Gemma Scope 2."""

    def write(folder: Path) -> Reference:
        drawn = tensors("jumprelu", skip=skip)
        names = {"W_enc": "w_enc", "W_dec": "w_dec", "W_skip": "affine_skip_connection"}
        stored = {names.get(name, name): one.T if name == "W_skip" else one for name, one in drawn.items()}
        if config is not None:
            put(folder / place / "config.json", {"architecture": "jump_relu", "width": D_SAE, "l0": 10} | config)
        save(folder / place / "params.safetensors", stored)
        return Reference("jumprelu", drawn, subtracts=False)

    return write


AT = "average_l0_6"
BARE = "models--google--gemma-scope-2-270m-pt/snapshots/0a/attn_out/layer_9_width_16k_l0_small"
BARE_SKIP = "gemma-scope-2-12b-it/transcoder_all/layer_30_width_16k_l0_big_affine"
SCOPE = {
    "1: res": Layout(
        "gemma-scope",
        scope({}),
        {"model_name": "google/gemma-2-2b", "hook_name": "blocks.12.hook_resid_post", "hook_layer": 12},
        place=f"gemma-scope-2b-pt-res/layer_12/width_16k/{AT}",
    ),
    "1: the file itself, lower-case names": Layout(
        "gemma-scope",
        scope({"W_enc": "w_enc", "W_dec": "w_dec"}),
        {"model_name": "google/gemma-2-2b", "hook_name": "blocks.12.hook_resid_post", "hook_layer": 12},
        place=f"gemma-scope-2b-pt-res/layer_12/width_16k/{AT}/params.npz",
    ),
    "1: transcoder": Layout(
        "gemma-scope",
        scope({}, transcoder=True),
        {
            "model_name": "google/gemma-2-2b", "hook_name": "blocks.12.ln2.hook_normalized",
            "hook_name_out": "blocks.12.hook_mlp_out", "hook_layer": 12,
        },
        "load_gemma_scope_transcoder",
        f"gemma-scope-2b-pt-transcoders/layer_12/width_16k/{AT}",
    ),
    "2: resid_post": Layout(
        "gemma-scope",
        scope_2(
            {"type": "sae", "affine_connection": False, "model_name": "gemma-v3-1b-pt"}
            | {"hf_hook_point_in": "model.layers.7.output", "hf_hook_point_out": "model.layers.7.output"}
        ),
        {
            "model_name": "google/gemma-3-1b-pt", "hook_name": "blocks.7.hook_resid_post", "hook_layer": 7,
            "module": "model.layers.7",
        },
    ),
    "2: transcoder with a skip": Layout(
        "gemma-scope",
        scope_2(
            {"type": "transcoder", "affine_connection": True, "model_name": "google/gemma-3-270m"}
            | {"hf_hook_point_in": "model.layers.7.pre_feedforward_layernorm.output"}
            | {"hf_hook_point_out": "model.layers.7.post_feedforward_layernorm.output"},
            skip=True,
        ),
        {
            "model_name": "google/gemma-3-270m", "hook_name": "blocks.7.mlp.hook_in", "hook_layer": 7,
            "hook_name_out": "blocks.7.hook_mlp_out", "module": "model.layers.7.pre_feedforward_layernorm",
            "module_out": "model.layers.7.post_feedforward_layernorm",
        },
        "load_gemma_scope_2_transcoder",
    ),
    "2: an SAE without settings": Layout(
        "gemma-scope",
        scope_2(None, BARE),
        {"model_name": "google/gemma-3-270m", "hook_name": "blocks.9.attn.hook_z", "hook_layer": 9},
        place=BARE,
    ),
    "2: a transcoder with a skip without settings": Layout(
        "gemma-scope",
        scope_2(None, BARE_SKIP, skip=True),
        {
            "model_name": "google/gemma-3-12b-it", "hook_name": "blocks.30.mlp.hook_in", "hook_layer": 30,
            "hook_name_out": "blocks.30.hook_mlp_out", "module": "model.layers.30.pre_feedforward_layernorm",
            "module_out": "model.layers.30.post_feedforward_layernorm",
        },
        "load_gemma_scope_2_transcoder",
        BARE_SKIP,
    ),
}  # fmt: skip


def traced(kind: str, *, skip: bool = False) -> Any:
    """Return a function that writes a circuit-tracer transcoder set for two layers."""

    def write(folder: Path) -> Reference:
        for layer in (2, 3):
            drawn = tensors(kind, skip=skip)
            drawn |= {"threshold": drawn["threshold"].abs()} if kind == "jumprelu" else {}
            stored = {
                ("activation_function." if name == "threshold" else "") + name: one for name, one in drawn.items()
            }
            save(folder / f"layer_{layer}.safetensors", stored | {"W_enc": drawn["W_enc"].T})
        (folder / "config.yaml").write_text(
            'model_name: "Qwen/Qwen3-0.6B"\nmodel_kind: transcoder_set # of all layers\n'
            "feature_input_hook: mlp.hook_in\nfeature_output_hook: 'hook_mlp_out'\nscan: x@y\ntranscoders:\n- hf://a/b\n"
        )
        return Reference(kind, drawn, subtracts=False)

    return write


OF_SET = {
    "model_name": "Qwen/Qwen3-0.6B", "hook_name": "blocks.3.mlp.hook_in", "hook_name_out": "blocks.3.hook_mlp_out",
    "hook_layer": 3,
}  # fmt: skip
TRACED = {
    "relu": Layout("circuit-tracer", traced("standard"), OF_SET, "load_relu_transcoder", "layer_3.safetensors"),
    "jumprelu with a skip": Layout(
        "circuit-tracer", traced("jumprelu", skip=True), OF_SET, "load_relu_transcoder", "layer_3.safetensors"
    ),
}
LAYOUTS = {
    f"{tool} {name}": layout
    for tool, layouts in (
        ("saelens", SAELENS),
        ("sparsify", SPARSIFY),
        ("dictionary_learning", DICTIONARIES),
        ("gemma-scope", SCOPE),
        ("circuit-tracer", TRACED),
    )
    for name, layout in layouts.items()
}

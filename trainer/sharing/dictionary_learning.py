"""Marks's and Karvonen's dictionary_learning: `config.json` and `ae.pt`, a state dict; SAEs only."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoints.atomic_folder import fill_folder, write_json
from trainer.contract.errors import UsageError, UserError
from trainer.contract.files import write_whole
from trainer.sharing.base import Format, Shared, forget_card
from trainer.sharing.reading import (
    checked,
    converted,
    holds,
    read_config,
    read_state_dict,
    taken,
    with_input_bias,
    without_input_bias,
)

CONFIG, WEIGHTS = "config.json", "ae.pt"
_LINEAR = {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "W_dec": "decoder.weight"}
_OWN = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec")}


class _Kind(NamedTuple):
    """One of its classes: SAELens' architecture that computes the same, and what its tensors are called.

    `transposed` are stored as an nn.Linear has them; `extra` are tensors that say how it is used.
    """

    architecture: str
    names: dict[str, str]
    transposed: bool
    # Whether the encoder sees x − b_dec.
    subtracts: bool = True
    extra: tuple[str, ...] = ()


_KINDS = {
    "AutoEncoder": _Kind("standard", _LINEAR | {"b_dec": "bias"}, transposed=True),
    "AutoEncoderNew": _Kind("standard", _LINEAR | {"b_dec": "decoder.bias"}, transposed=True, subtracts=False),
    "AutoEncoderTopK": _Kind("topk", _LINEAR | {"b_dec": "b_dec"}, transposed=True, extra=("k", "threshold")),
    "BatchTopKSAE": _Kind("jumprelu", _LINEAR | {"b_dec": "b_dec"}, transposed=True, extra=("k", "threshold")),
    "MatryoshkaBatchTopKSAE": _Kind("jumprelu", _OWN, transposed=False, extra=("k", "threshold", "group_sizes")),
    "JumpReluAutoEncoder": _Kind("jumprelu", _OWN | {"threshold": "threshold"}, transposed=False, subtracts=False),
    "GatedAutoEncoder": _Kind(
        "gated",
        {
            "W_enc": "encoder.weight",
            "W_dec": "decoder.weight",
            "b_dec": "decoder_bias",
            "r_mag": "r_mag",
            "b_gate": "gate_bias",
            "b_mag": "mag_bias",
        },
        transposed=True,
    ),
}
# By what an SAE was trained as, and by what it computes.
_TRAINED = {"batch_topk": "BatchTopKSAE", "matryoshka_batch_topk": "MatryoshkaBatchTopKSAE"}
_COMPUTED = {
    # AutoEncoder scales its activations by the norms of decoder rows as it is loaded; this one does not.
    "standard": "AutoEncoderNew",
    "topk": "AutoEncoderTopK",
    "jumprelu": "JumpReluAutoEncoder",
    "gated": "GatedAutoEncoder",
}


class DictionaryLearning(Format):
    """Holds every SAE that we train, and no transcoder."""

    files = (CONFIG, WEIGHTS)

    def refusal(self, sae: Shared) -> str | None:
        if sae.is_transcoder:
            return "dictionary_learning knows no transcoders"
        if sae.architecture not in _COMPUTED:
            return f"dictionary_learning knows no {sae.architecture} SAE"
        return None

    def write(self, sae: Shared, folder: Path) -> list[str]:
        name = _class_of(sae)
        with fill_folder(folder, last=CONFIG) as temporary:
            write_whole(temporary / WEIGHTS, _saved(_state_dict(sae, name)))
            write_json(temporary / CONFIG, _config(sae, name))
        forget_card(folder)
        return []

    def recognises(self, folder: Path) -> bool:
        return holds(folder, CONFIG, WEIGHTS)

    def read(self, folder: Path) -> Shared:
        trainer = read_config(folder / CONFIG).get("trainer")
        name = trainer.get("dict_class") if isinstance(trainer, dict) else None
        if not isinstance(trainer, dict) or not isinstance(name, str) or name not in _KINDS:
            listed = ", ".join(_KINDS)
            raise UsageError(f"{folder / CONFIG}: trainer.dict_class is {str(name)[:60]!r}; only {listed} can be taken")
        return _shared(_KINDS[name], name, trainer, read_state_dict(folder / WEIGHTS), folder / WEIGHTS)


def _class_of(sae: Shared) -> str:
    """Return the class that computes what an SAE does; its own one where a single threshold and k are known."""
    name = _TRAINED.get(sae.trained_as)
    if name is None or sae.k is None or (sae.weights["threshold"] != sae.weights["threshold"][0]).any():
        return _COMPUTED[sae.architecture]
    return name if sae.levels or "Matryoshka" not in name else "BatchTopKSAE"


def _state_dict(sae: Shared, name: str) -> dict[str, Tensor]:
    kind = _KINDS[name]
    weights = sae.weights if kind.subtracts else without_input_bias(sae.weights)
    turned = ("W_enc", "W_dec") if kind.transposed else ()
    tensors = {
        theirs: weights[ours].T.contiguous() if ours in turned else weights[ours].contiguous()
        for ours, theirs in kind.names.items()
    }
    return tensors | {extra: _extra(sae, extra) for extra in kind.extra}


def _extra(sae: Shared, name: str) -> Tensor:
    if name == "k":
        return torch.tensor(sae.k, dtype=torch.int)
    if name == "group_sizes":
        return torch.tensor([sae.levels[0], *(b - a for a, b in zip(sae.levels, sae.levels[1:], strict=False))])
    # −1 says of a TopK SAE that it has none.
    return sae.weights["threshold"][0].clone() if "threshold" in sae.weights else torch.tensor(-1.0)


def _saved(tensors: dict[str, Tensor]) -> bytes:
    """Return a file of `torch.save`; it reads these tensors and nothing else."""
    stream = io.BytesIO()
    # A copy: a view would be saved with all that it is a part of.
    torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()}, stream)
    return stream.getvalue()


def _config(sae: Shared, name: str) -> dict[str, Any]:
    facts = sae.metadata
    return {
        "trainer": {
            "dict_class": name,
            "activation_dim": sae.d_in,
            "dict_size": sae.d_sae,
            **({"k": sae.k} if "k" in _KINDS[name].extra else {}),
            "layer": facts.get("hook_layer"),
            "lm_name": facts.get("model_name"),
            "submodule_name": facts.get("hook_name"),
        },
        "buffer": {"d_submodule": sae.d_in, "ctx_len": facts.get("context_size")},
        "metadata": facts,
    }


def _shared(kind: _Kind, name: str, trainer: dict[str, Any], tensors: dict[str, Tensor], file: Path) -> Shared:
    extra = {one: tensors.pop(one) for one in kind.extra if one in tensors}
    weights = taken(tensors, kind.names, file)
    if any(weights[matrix].dim() != 2 for matrix in ("W_enc", "W_dec")):
        raise UserError(f"{file}: {kind.names['W_enc']} or {kind.names['W_dec']} is no matrix of weights")
    if kind.transposed:
        weights |= {matrix: weights[matrix].T for matrix in ("W_enc", "W_dec")}
    if kind.architecture == "jumprelu" and "threshold" not in weights:
        # Below 0 where it was never set: then all that is positive is active.
        threshold = float(extra["threshold"]) if extra.get("threshold", torch.ones(2)).numel() == 1 else 0.0
        weights["threshold"] = torch.full((weights["W_enc"].shape[1],), max(0.0, threshold))
    k = trainer.get("k") if isinstance(trainer.get("k"), int) else None
    own = {"architecture": kind.architecture, **({"k": k} if kind.architecture == "topk" else {})}
    trained = {theirs: ours for ours, theirs in _TRAINED.items()}.get(name, kind.architecture)
    facts = {
        "training_architecture": trained,
        "model_name": trainer.get("lm_name"),
        "hook_name": trainer.get("submodule_name"),
        "hook_layer": trainer.get("layer"),
    }
    sae = Shared(own, weights, {one: value for one, value in facts.items() if value is not None}, k=k)
    checked(sae, file)
    if name == "AutoEncoder":
        sae = sae._replace(weights=_with_unit_rows(weights))
    return converted(sae if kind.subtracts else sae._replace(weights=with_input_bias(sae.weights)), file)


@torch.no_grad()
def _with_unit_rows(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a ReLU SAE as `AutoEncoder` scales them when it is loaded."""
    norms = weights["W_dec"].norm(dim=1)
    unit = weights["W_dec"] / norms.clamp_min(torch.finfo(norms.dtype).tiny)[:, None]
    return weights | {"W_enc": weights["W_enc"] * norms, "b_enc": weights["b_enc"] * norms, "W_dec": unit}

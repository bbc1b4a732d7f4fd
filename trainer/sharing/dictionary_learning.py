"""The format of dictionary_learning by Marks and Karvonen: `config.json` and a state dict `ae.pt`; SAEs only."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.checkpoints.atomic_folder import fill_folder, write_json
from trainer.contract.errors import UsageError, UserError
from trainer.contract.files import write_whole
from trainer.contract.hub_cache import is_plain_file
from trainer.sharing.base import NOTHING_GIVEN, Format, Given, SharedSae, forget_card, holds, refusal_of_several_hooks
from trainer.sharing.origins import of_submodule, origin_of
from trainer.sharing.reading import (
    checked,
    converted,
    positive,
    positive_thresholds,
    read_config,
    read_state_dict,
    table,
    taken,
    with_input_bias,
    with_unit_rows,
    without_input_bias,
)

CONFIG, WEIGHTS = "config.json", "ae.pt"
_LINEAR = {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "W_dec": "decoder.weight"}
_OWN = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec")}


class _DictionaryClass(NamedTuple):
    """A class in dictionary_learning, with the equivalent SAELens architecture and the tensor names.

    `transposed` means that matrices are stored as in an nn.Linear. `extra` contains the names of optional tensors such
    as k.
    """

    architecture: str
    names: dict[str, str]
    transposed: bool
    # Whether the encoder's input is x − b_dec.
    subtracts: bool = True
    extra: tuple[str, ...] = ()


_KINDS = {
    "AutoEncoder": _DictionaryClass("standard", _LINEAR | {"b_dec": "bias"}, transposed=True),
    "AutoEncoderNew": _DictionaryClass(
        "standard", _LINEAR | {"b_dec": "decoder.bias"}, transposed=True, subtracts=False
    ),
    "AutoEncoderTopK": _DictionaryClass(
        "topk", _LINEAR | {"b_dec": "b_dec"}, transposed=True, extra=("k", "threshold")
    ),
    "BatchTopKSAE": _DictionaryClass(
        "jumprelu", _LINEAR | {"b_dec": "b_dec"}, transposed=True, extra=("k", "threshold")
    ),
    "MatryoshkaBatchTopKSAE": _DictionaryClass(
        "jumprelu", _OWN, transposed=False, extra=("k", "threshold", "group_sizes")
    ),
    "JumpReluAutoEncoder": _DictionaryClass(
        "jumprelu", _OWN | {"threshold": "threshold"}, transposed=False, subtracts=False
    ),
    "GatedAutoEncoder": _DictionaryClass(
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
# Maps each class to a lower-case substring of its trainer's name.
_TRAINERS = {
    "AutoEncoder": "standard",
    "AutoEncoderNew": "standard",
    "AutoEncoderTopK": "topk",
    "BatchTopKSAE": "batchtopk",
    "MatryoshkaBatchTopKSAE": "batchtopk",
    "JumpReluAutoEncoder": "jump",
    "GatedAutoEncoder": "gated",
}
# Class names, first by training architecture and then by SAELens architecture.
_TRAINED = {"batch_topk": "BatchTopKSAE", "matryoshka_batch_topk": "MatryoshkaBatchTopKSAE"}
_COMPUTED = {
    # When loaded, AutoEncoder scales its activations by the decoder norms; AutoEncoderNew does not.
    "standard": "AutoEncoderNew",
    "topk": "AutoEncoderTopK",
    "jumprelu": "JumpReluAutoEncoder",
    "gated": "GatedAutoEncoder",
}


class DictionaryLearning(Format):
    """Stores all SAEs that we train, but no transcoders."""

    files = (CONFIG, WEIGHTS)
    reads = ((CONFIG, WEIGHTS),)

    def refusal(self, sae: SharedSae) -> str | None:
        if reason := refusal_of_several_hooks(sae, "dictionary_learning"):
            return reason
        if sae.is_transcoder:
            return "dictionary_learning has no transcoders"
        if sae.architecture not in _COMPUTED:
            return f"dictionary_learning has no {sae.architecture} SAEs"
        return None

    def write(self, sae: SharedSae, folder: Path) -> list[str]:
        name = _class_of(sae)
        with fill_folder(folder, last=CONFIG) as temporary:
            write_whole(temporary / WEIGHTS, _saved(_state_dict(sae, name)))
            write_json(temporary / CONFIG, _config(sae, name))
        forget_card(folder)
        return []

    def recognises(self, place: Path) -> bool:
        return _files(place) is not None

    def read(self, place: Path, given: Given = NOTHING_GIVEN) -> SharedSae:
        config_file, weights_file = _files(place) or (place / CONFIG, place / WEIGHTS)
        config = read_config(config_file, given)
        trainer = table(config, "trainer")
        tensors = read_state_dict(weights_file)
        name = _class_in(trainer, tensors, config_file)
        sae = _shared(_kind(name, tensors), name, trainer, tensors, weights_file)
        return sae._replace(metadata={**sae.metadata, **_origin(config, trainer)})


def _files(place: Path) -> tuple[Path, Path] | None:
    """Return the settings file and weights file; a checkpoint's settings may be in the parent folder."""
    if place.is_dir():
        return (place / CONFIG, place / WEIGHTS) if holds(place, CONFIG, WEIGHTS) else None
    if place.suffix != ".pt" or not is_plain_file(place):
        return None
    return next(((one / CONFIG, place) for one in (place.parent, place.parent.parent) if holds(one, CONFIG)), None)


def _class_in(trainer: dict[str, Any], tensors: dict[str, Tensor], file: Path) -> str:
    """Return a dictionary's class name from its settings, or else from the names of its trainer and tensors.

    Settings from before mid-2024 do not state the class.
    """
    said = trainer.get("dict_class")
    if said is not None:
        name = str(said).rstrip("'>").rpartition(".")[2].replace("Matroyshka", "Matryoshka")
        if not isinstance(said, str) or name not in _KINDS:
            listed = ", ".join(_KINDS)
            raise UsageError(f"{file}: trainer.dict_class is {str(said)[:60]!r}; only {listed} can be imported")
        return name
    fitting = [name for name, kind in _KINDS.items() if _fits(kind, tensors)]
    trained = [name for name in fitting if _TRAINERS[name] in str(trainer.get("trainer_class")).lower()]
    if len(fitting) == 1 or trained:
        # "TrainerBatchTopK" also contains "topk", so use the longest match.
        return max(trained or fitting, key=lambda one: len(_TRAINERS[one]))
    raise UsageError(
        f"{file}: trainer.dict_class is missing, and the tensors fit several classes or none; use --config "
        f"trainer.dict_class=NAME with NAME one of {', '.join(fitting or _KINDS)}"
    )


def _fits(kind: _DictionaryClass, tensors: dict[str, Tensor]) -> bool:
    """Return whether the tensor names match a class; its `extra` tensors are optional."""
    names = {*kind.names.values()}
    return names <= tensors.keys() <= {*names, *kind.extra}


def _kind(name: str, tensors: dict[str, Tensor]) -> _DictionaryClass:
    """Return the `_DictionaryClass` with this name; early Matryoshka SAEs store matrices like nn.Linear."""
    if name == "MatryoshkaBatchTopKSAE" and "encoder.weight" in tensors:
        return _KINDS["BatchTopKSAE"]._replace(extra=_KINDS[name].extra)
    return _KINDS[name]


def _origin(config: dict[str, Any], trainer: dict[str, Any]) -> dict[str, Any]:
    """Return an SAE's origin; our own metadata overrides the settings for the trainer and its buffer."""
    place = trainer.get("submodule_name")
    facts = {
        "model_name": trainer.get("lm_name"),
        "hook_layer": trainer.get("layer"),
        "context_size": table(config, "buffer").get("ctx_len"),
        **(of_submodule(place) if isinstance(place, str) else {}),
    }
    return origin_of({**facts, **table(config, "metadata")})


def _class_of(sae: SharedSae) -> str:
    """Return the name of a class with the same output as the SAE.

    The class for the SAE's training method is used only if k is known and all latents share one threshold.
    """
    name = _TRAINED.get(sae.trained_as)
    if name is None or sae.k is None or (sae.weights["threshold"] != sae.weights["threshold"][0]).any():
        return _COMPUTED[sae.architecture]
    return name if sae.levels or "Matryoshka" not in name else "BatchTopKSAE"


def _state_dict(sae: SharedSae, name: str) -> dict[str, Tensor]:
    kind = _KINDS[name]
    weights = sae.weights if kind.subtracts else without_input_bias(sae.weights)
    turned = ("W_enc", "W_dec") if kind.transposed else ()
    tensors = {
        theirs: weights[ours].T.contiguous() if ours in turned else weights[ours].contiguous()
        for ours, theirs in kind.names.items()
    }
    return tensors | {extra: _extra(sae, extra) for extra in kind.extra}


def _extra(sae: SharedSae, name: str) -> Tensor:
    if name == "k":
        return torch.tensor(sae.k, dtype=torch.int)
    if name == "group_sizes":
        return torch.tensor([sae.levels[0], *(b - a for a, b in zip(sae.levels, sae.levels[1:], strict=False))])
    # −1 marks a TopK SAE without a threshold.
    return sae.weights["threshold"][0].clone() if "threshold" in sae.weights else torch.tensor(-1.0)


def _saved(tensors: dict[str, Tensor]) -> bytes:
    """Return the tensors as the bytes of a `torch.save` file."""
    stream = io.BytesIO()
    # Copy each tensor, because `torch.save` writes the entire storage of a view.
    torch.save({name: tensor.detach().clone() for name, tensor in tensors.items()}, stream)
    return stream.getvalue()


def _config(sae: SharedSae, name: str) -> dict[str, Any]:
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


def _shared(
    kind: _DictionaryClass, name: str, trainer: dict[str, Any], tensors: dict[str, Tensor], file: Path
) -> SharedSae:
    extra = {one: tensors.pop(one) for one in kind.extra if one in tensors}
    weights = taken(tensors, kind.names, file, transposed=("W_enc", "W_dec") if kind.transposed else ())
    if kind.architecture == "jumprelu" and "threshold" not in weights:
        weights["threshold"] = torch.full_like(weights["b_enc"], _threshold(extra, trainer, name, file))
    k, stored_k = trainer.get("k"), _k_of(extra)
    if type(k) is int and stored_k not in (None, k) and kind.architecture == "topk":
        raise UserError(
            f"{file}: k is {stored_k}, but {k} in its settings; set the correct value with --config trainer.k=K"
        )
    k = k if type(k) is int else stored_k
    own = {"architecture": kind.architecture, **({"k": k} if kind.architecture == "topk" else {})}
    trained = {theirs: ours for ours, theirs in _TRAINED.items()}.get(name, kind.architecture)
    sae = positive_thresholds(SharedSae(own, weights, {"training_architecture": trained}, k=k))
    checked(sae, file)
    if name == "AutoEncoder":
        sae = sae._replace(weights=with_unit_rows(weights))
    return converted(sae if kind.subtracts else sae._replace(weights=with_input_bias(sae.weights)), file)


def _threshold(extra: dict[str, Tensor], trainer: dict[str, Any], name: str, file: Path) -> float:
    """Return the activation threshold.

    If training never set the threshold, dictionary_learning stores a negative value, which has no effect.
    """
    stored, said = extra.get("threshold"), positive(trainer.get("threshold"))
    if stored is not None and stored.numel() == 1 and not stored.is_complex():
        return float(stored)
    if said is not None:
        return said
    raise UsageError(
        f"{file} has no threshold: a {name} from before December 2024 selects latents across an entire batch, "
        f"which no supported architecture does at inference; set a threshold with --config trainer.threshold=NUMBER"
    )


def _k_of(extra: dict[str, Tensor]) -> int | None:
    stored = extra.get("k")
    if stored is None or stored.numel() != 1 or stored.is_floating_point() or stored.is_complex():
        return None
    return int(stored)

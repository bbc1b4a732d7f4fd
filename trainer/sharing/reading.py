"""Reads other people's SAEs: plain files of a bounded size, tensors alone, never a pickle that runs code."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.contract.errors import UsageError, UserError, first_line, sentence
from trainer.contract.files import open_plain
from trainer.contract.json_file import load_json
from trainer.contract.settings.rows import NotRowsError
from trainer.contract.settings.torch_file import refuse_old_kind
from trainer.sharing.base import Shared

# By what activations are (`Shared.form`): the tensors [d_sae] beside W_enc, W_dec and b_dec.
PER_LATENT = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def holds(folder: Path, *names: str) -> bool:
    """Tell whether these plain files, and no links, lie in a folder."""
    return all((folder / name).is_file() and not (folder / name).is_symlink() for name in names)


def read_config(file: Path) -> dict[str, Any]:
    """Read a JSON object; raise `UserError` where there is none."""
    _refuse_link(file)
    try:
        return load_json(file, dict[str, Any])
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {sentence(error)}") from None


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a safetensors file; raise `UserError` where it is none."""
    _refuse_link(file)
    try:
        open_plain(file).close()
        return load_file(file)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        reason = sentence(error) if isinstance(error, OSError) else first_line(error)
        raise UserError(f"{file} is not a whole safetensors file: {reason}") from None


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Read a file of `torch.save` that holds nothing but tensors by name; raise `UserError` for any other.

    Nothing in it is run. A small file that would fill the memory, by compression or by tensors larger than what is
    stored of them, is refused.
    """
    _refuse_link(file)
    try:
        open_plain(file).close()
        refuse_old_kind(file)
        _refuse_compression(file)
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UserError:
        raise
    except (OSError, NotRowsError) as error:
        raise UserError(f"{file} is not read: {sentence(error)}") from None
    except Exception as error:
        reason = first_line(error)
        raise UserError(f"{file} holds more than tensors, or is damaged, and is not read: {reason}") from None
    is_plain = isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) and _is_stored(value) for name, value in content.items()
    )
    if not is_plain:
        raise UserError(f"{file} is no state dict, tensors by name; save `dictionary.state_dict()` there")
    return dict(content)


def _refuse_compression(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise UserError(f"{file} is compressed, as torch.save never does; it is not read")


def _is_stored(value: Tensor) -> bool:
    """Tell whether every number of a tensor has a place of its own."""
    is_dense = value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu"
    return is_dense and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _refuse_link(file: Path) -> None:
    if file.is_symlink():
        raise UserError(f"{file} is a link, which is not followed; copy the file itself there")


def taken(tensors: Mapping[str, Tensor], names: Mapping[str, str], file: Path) -> dict[str, Tensor]:
    """Return tensors by our names, `names` being theirs, in fp32; raise `UserError` where others are there, or none."""
    theirs = set(names.values())
    if missing := sorted(theirs - tensors.keys()):
        raise UserError(f"{file} has no tensor {missing[0]}; it holds another kind of SAE than its settings say")
    if others := sorted(tensors.keys() - theirs):
        raise UserError(f"{file} has a tensor {others[0][:60]}, which no architecture here computes with")
    for name in theirs:
        if tensors[name].dtype not in _FLOATS:
            raise UserError(f"{file}: {name} is {str(tensors[name].dtype).removeprefix('torch.')}, not of floats")
    return {ours: tensors[name].float() for ours, name in names.items()}


def checked(sae: Shared, place: Path) -> Shared:
    """Return an SAE whose tensors fit each other and are finite; raise `UserError` for any other."""
    for name in ("W_enc", "W_dec"):
        if sae.weights[name].dim() != 2 or not sae.weights[name].numel():
            raise UserError(f"{place}: {name} is no matrix of weights")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(PER_LATENT[sae.form], (sae.d_sae,))
    shapes |= {"W_enc": (sae.d_in, sae.d_sae), "W_dec": (sae.d_sae, sae.d_out), "b_dec": (sae.d_out,)}
    shapes |= {"W_skip": (sae.d_out, sae.d_in)} if sae.has_skip else {}
    for name, shape in shapes.items():
        tensor = sae.weights[name]
        if tuple(tensor.shape) != shape:
            raise UserError(f"{place}: {name} is {tuple(tensor.shape)} where the encoder wants {shape}")
        if not tensor.isfinite().all():
            raise UserError(f"{place}: {name} holds a NaN or an infinity; copy it again")
    if not sae.is_transcoder and sae.d_in != sae.d_out:
        raise UserError(f"{place}: the SAE maps {sae.d_in} dimensions to {sae.d_out}")
    if "threshold" in sae.weights and (sae.weights["threshold"] < 0).any():
        raise UserError(f"{place}: a threshold is below 0, which no architecture here has")
    # True is an int of Python's.
    if sae.form == "topk" and not (type(sae.k) is int and 1 <= sae.k <= sae.d_sae):
        raise UserError(f"{place}: k must be a whole number from 1 to {sae.d_sae}, not {str(sae.k)[:60]}")
    return sae


def converted(sae: Shared, place: Path) -> Shared:
    """Return an SAE whose weights are finite as they are computed with here; raise `UserError` for any other."""
    for name, tensor in sae.weights.items():
        if not tensor.isfinite().all():
            raise UserError(f"{place}: its weights are so large that {name} is beyond fp32 as it is computed with here")
    return sae


@torch.no_grad()
def with_input_bias(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of an encoder of x as those of one of x − b_dec, which compute the same."""
    shift = (weights["b_dec"].double() @ weights["W_enc"].double()).float()
    moved: dict[str, Tensor] = {name: weights[name] + shift for name in ("b_enc", "b_gate") if name in weights}
    if "b_mag" in weights:
        # The magnitudes have an encoder of their own scale.
        moved["b_mag"] = weights["b_mag"] + shift * weights["r_mag"].exp()
    return weights | moved


@torch.no_grad()
def without_input_bias(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of an encoder of x − b_dec as those of one of x; not of a gated one."""
    shift = (weights["b_dec"].double() @ weights["W_enc"].double()).float()
    return weights | {"b_enc": weights["b_enc"] - shift}


def wanted(config: Mapping[str, Any], place: Path, **values: Any) -> None:
    """Raise `UsageError` where a setting that changes the result has none of the values that can be computed here."""
    for name, allowed in values.items():
        if config.get(name, allowed[0]) not in allowed:
            listed = " or ".join(repr(value) for value in allowed)
            raise UsageError(f"{place}: {name} is {str(config[name])[:60]!r}; only {listed} can be taken")

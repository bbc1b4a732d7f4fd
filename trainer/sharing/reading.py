"""Safely reads SAE files from other people: only regular files of limited size, and only tensors, not pickled code."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.activations.foreign import refuse_old_format
from trainer.contract.errors import UsageError, UserError, first_line, sentence
from trainer.contract.files import open_plain
from trainer.contract.hub_cache import plain_file
from trainer.contract.json_file import decode_as, load_json
from trainer.contract.machine_memory import machine_memory
from trainer.contract.settings.rows import NotRowsError
from trainer.sharing.base import NOTHING_GIVEN, Given, SharedSae

# Maps each `SharedSae.form` to the names of its tensors [d_sae], in addition to W_enc, W_dec and b_dec.
PER_LATENT = {
    "standard": ("b_enc",),
    "topk": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
# The maximum number of bytes to read from a text file.
_LARGEST_TEXT = 2**20
# Matches parts of torch messages to hide from users, because they recommend loading a file in a way that could run code
# from the file.
_REASONS = re.compile(r"In PyTorch 2\.6.*|Re-running `torch.load`.*", re.DOTALL)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def read_config(file: Path, given: Given = NOTHING_GIVEN) -> dict[str, Any]:
    """Read a JSON object and apply the user's settings to it; raise `UserError` if the file cannot be read."""
    try:
        config = load_json(_plain(file), dict[str, Any])
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {sentence(error)}") from None
    return with_given(config, given)


def table(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table of settings, or {} if it is missing or not a table."""
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def read_text(file: Path) -> str:
    """Read a small text file from another tool; raise `UserError` if it cannot be read."""
    try:
        with open_plain(_plain(file)) as stream:
            return stream.read(_LARGEST_TEXT).decode("utf-8-sig", errors="replace")
    except OSError as error:
        raise UserError(f"{file} cannot be read: {sentence(error)}") from None


def parsed_config(words: Iterable[str]) -> dict[str, Any]:
    """Parse the KEY=VALUE arguments of --config; a value is parsed as JSON if possible, otherwise as a string."""
    given: dict[str, Any] = {}
    for word in words:
        key, is_given, value = word.partition("=")
        if not is_given or not all(key.split(".")):
            raise UsageError(f"--config: expects KEY=VALUE, like trainer.dict_class=AutoEncoder, not {word[:60]!r}")
        try:
            given[key] = decode_as(value, Any)
        except ValueError:
            given[key] = value
    return given


def with_given(config: dict[str, Any], given: Given) -> dict[str, Any]:
    """Override settings in place with the user's settings, keyed by dotted paths; create missing tables."""
    for path, value in given.config.items():
        *tables, name = path.split(".")
        place = config
        for table in tables:
            if not isinstance(place.get(table), dict):
                place[table] = {}
            place = place[table]
        place[name] = value
    return config


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors in a safetensors file; raise `UserError` for any other file."""
    whole = _plain(file)
    try:
        _refuse_huge(whole)
        return load_file(whole)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        reason = sentence(error) if isinstance(error, OSError) else first_line(error)
        raise UserError(f"{file} is not a complete safetensors file: {reason}") from None
    except MemoryError:
        raise UserError(f"{file} does not fit in memory") from None


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Read a `torch.save` file that contains only named tensors; raise `UserError` for any other file.

    Code in the file is not run. Compressed files, and tensors larger than their stored data, are refused, because they
    would allow a small file to exhaust memory.
    """
    whole = _plain(file)
    try:
        _refuse_huge(whole)
        refuse_old_format(whole)
        _refuse_compression(whole)
        content = torch.load(whole, map_location="cpu", weights_only=True, mmap=True)
    except UserError:
        raise
    except (OSError, NotRowsError) as error:
        raise UserError(f"{file} was not read: {sentence(error)}") from None
    except Exception as error:
        reason = _REASONS.sub("", first_line(error)).strip()
        raise UserError(f"{file} contains more than tensors or is corrupt, so it was not read: {reason}") from None
    is_plain = isinstance(content, dict) and all(
        isinstance(name, str) and isinstance(value, Tensor) and _is_stored(value) for name, value in content.items()
    )
    if not is_plain:
        raise UserError(f"{file} is not a state dict; save `dictionary.state_dict()` there")
    return dict(content)


def read_npz(file: Path) -> dict[str, Tensor]:
    """Read the arrays in a `numpy.savez` file; raise `UserError` for any other file.

    Arrays of Python objects are refused, because reading them could run code. Compressed files, and arrays larger than
    their stored data, are refused, because they would allow a small file to exhaust memory.
    """
    whole = _plain(file)
    try:
        _refuse_huge(whole)
        _refuse_compression(whole)
        _refuse_empty_promises(whole)
        with numpy.load(whole, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except UserError:
        raise
    except Exception as error:
        reason = first_line(error)
        raise UserError(f"{file} contains more than arrays or is corrupt, so it was not read: {reason}") from None


def _refuse_compression(file: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise UserError(f"{file} was not read: it is compressed, unlike files of torch.save and numpy.savez")


def _refuse_empty_promises(file: Path) -> None:
    """Raise `ValueError`, before memory is allocated, if an array's header claims more data than the file stores."""
    headers = {(1, 0): numpy.lib.format.read_array_header_1_0, (2, 0): numpy.lib.format.read_array_header_2_0}
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            with archive.open(entry) as stream:
                shape, _, dtype = headers[numpy.lib.format.read_magic(stream)](stream)
            if math.prod(shape) * dtype.itemsize > entry.file_size:
                raise ValueError(f"{entry.filename[:60]} is shorter than its header says")


def _is_stored(value: Tensor) -> bool:
    """Return whether a tensor is dense, on the CPU and no larger than its storage."""
    is_dense = value.layout == torch.strided and not value.is_quantized and value.device.type == "cpu"
    return is_dense and value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _plain(file: Path) -> Path:
    """Return the regular file at a path; raise `UserError` for pipes, git-lfs pointers and links outside the cache."""
    try:
        whole = plain_file(file)
        open_plain(whole).close()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {sentence(error)}") from None
    except ValueError as error:
        raise UserError(f"{file} {error}") from None
    return whole


def _refuse_huge(file: Path) -> None:
    """Raise `ValueError` for a file larger than the free memory, such as a sparse file."""
    if (size := file.stat().st_size) > (free := machine_memory().available_bytes):
        raise ValueError(f"it has {size / 2**30:,.0f} GiB, but only {free / 2**30:,.0f} GiB of memory are free")


def taken(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], file: Path, transposed: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the tensors in fp32 under our names, with the matrices in `transposed` transposed.

    `names` maps our names to the names in the file. Raise `UserError` for a missing, unknown or non-floating-point
    tensor, and if a tensor to transpose is not a matrix.
    """
    theirs = set(names.values())
    if missing := sorted(theirs - tensors.keys()):
        raise UserError(f"{file} has no tensor {missing[0]}; its settings describe a different type of SAE")
    if others := sorted(tensors.keys() - theirs):
        raise UserError(f"{file} has a tensor {others[0][:60]}, which no supported architecture uses")
    for name in theirs:
        if tensors[name].dtype not in _FLOATS:
            dtype = str(tensors[name].dtype).removeprefix("torch.")
            raise UserError(f"{file}: {name} is {dtype}, not a floating-point type")
    for name in (names[ours] for ours in transposed):
        if tensors[name].dim() != 2:
            raise UserError(f"{file}: {name} is not a weight matrix")
    own = {ours: tensors[name].float() for ours, name in names.items()}
    return own | {ours: own[ours].T for ours in transposed}


def checked(sae: SharedSae, place: Path) -> SharedSae:
    """Return the SAE; raise `UserError` if its shapes, values, thresholds or k are invalid."""
    for name in ("W_enc", "W_dec"):
        if sae.weights[name].dim() != 2 or not sae.weights[name].numel():
            raise UserError(f"{place}: {name} is not a weight matrix")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(PER_LATENT[sae.form], (sae.d_sae,))
    shapes |= {"W_enc": (sae.d_in, sae.d_sae), "W_dec": (sae.d_sae, sae.d_out), "b_dec": (sae.d_out,)}
    shapes |= {"W_skip": (sae.d_out, sae.d_in)} if sae.has_skip else {}
    for name, shape in shapes.items():
        tensor = sae.weights[name]
        if tuple(tensor.shape) != shape:
            raise UserError(f"{place}: {name} is {tuple(tensor.shape)} instead of {shape}")
        if not tensor.isfinite().all():
            raise UserError(f"{place}: {name} contains NaN or infinite values; copy it again")
    if not sae.is_transcoder and sae.d_in != sae.d_out:
        raise UserError(f"{place}: the SAE maps {sae.d_in} dimensions to {sae.d_out}")
    if "threshold" in sae.weights and (sae.weights["threshold"] < 0).any():
        raise UserError(f"{place}: a threshold is below 0, which no supported architecture allows")
    # In Python, True is an int.
    if sae.form == "topk" and not (type(sae.k) is int and 1 <= sae.k <= sae.d_sae):
        raise UserError(f"{place}: k must be a whole number from 1 to {sae.d_sae}, not {str(sae.k)[:60]}")
    return sae


def converted(sae: SharedSae, place: Path) -> SharedSae:
    """Return the SAE; raise `UserError` if conversion has made any weight infinite or NaN."""
    for name, tensor in sae.weights.items():
        if not tensor.isfinite().all():
            raise UserError(f"{place}: its weights are so large that {name} overflows fp32")
    return sae


@torch.no_grad()
def with_input_bias(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights for an encoder of x to equivalent weights for an encoder of x − b_dec."""
    shift = _encoded_bias(weights)
    moved: dict[str, Tensor] = {name: weights[name] + shift for name in ("b_enc", "b_gate") if name in weights}
    if "b_mag" in weights:
        # A gated SAE's magnitude encoder is W_enc * exp(r_mag).
        moved["b_mag"] = weights["b_mag"] + shift * weights["r_mag"].exp()
    return weights | moved


@torch.no_grad()
def with_unit_rows(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return equivalent weights with unit-norm decoder rows; activations are multiplied by the original norms."""
    norms = weights["W_dec"].norm(dim=1)
    unit = weights["W_dec"] / norms.clamp_min(torch.finfo(norms.dtype).tiny)[:, None]
    return weights | {"W_enc": weights["W_enc"] * norms, "b_enc": weights["b_enc"] * norms, "W_dec": unit}


def positive(value: object) -> float | None:
    """Return a setting from another tool's file if it is a number above 0, otherwise None."""
    # In Python, True is an int.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        return None
    return float(value)


@torch.no_grad()
def with_row_scale(weights: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    """Fold a scale factor for the input rows into the weights, so that unscaled rows produce the same activations."""
    scaled = {"W_enc": weights["W_enc"] * factor}
    return weights | scaled | {name: weights[name] / factor for name in ("W_dec", "b_dec")}


def positive_thresholds(sae: SharedSae) -> SharedSae:
    """Set negative thresholds to 0; after a ReLU, this does not change the output."""
    if "threshold" not in sae.weights:
        return sae
    return sae._replace(weights=sae.weights | {"threshold": sae.weights["threshold"].clamp_min(0)})


@torch.no_grad()
def without_input_bias(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights for an encoder of x − b_dec to weights for an encoder of x; gated SAEs are not supported."""
    return weights | {"b_enc": weights["b_enc"] - _encoded_bias(weights)}


def _encoded_bias(weights: Mapping[str, Tensor]) -> Tensor:
    """Return b_dec @ W_enc [d_sae], computed in float64."""
    return (weights["b_dec"].double() @ weights["W_enc"].double()).float()


def wanted(config: Mapping[str, Any], place: Path, **values: Any) -> None:
    """Raise `UsageError` if a setting's value is not allowed; the first allowed value is the default."""
    for name, allowed in values.items():
        if config.get(name, allowed[0]) not in allowed:
            listed = " or ".join(repr(value) for value in allowed)
            raise UsageError(f"{place}: {name} is {str(config[name])[:60]!r}; only {listed} can be imported")

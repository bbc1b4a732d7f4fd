"""Checks a language model's files before loading, because they may come from an untrusted source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from trainer.contract.errors import UserError
from trainer.contract.json_file import read_json
from trainer.contract.settings.declare import show

# The maximum file sizes, in bytes. The largest known configuration is 30 kB, and the largest tokenizer.json is 35 MB. A
# tokenizer_config.json has 180 bytes per added token, or 12 MB for the 65,000 tokens of some speech models.
_LARGEST_CONFIG, _LARGEST_JSON = 4 * 2**20, 256 * 2**20
_CONFIGS = ("config.json", "generation_config.json")
# The maximum numbers of blocks and experts. Blocks and most experts are separate modules, and building millions of
# modules would take hours and exhaust memory. The largest known models have 200 blocks and 512 experts. Doge has 16,384
# experts, but each expert is only one row of an embedding.
_MOST_LAYERS, _MOST_EXPERTS = 2048, 2**15
_WEIGHTS = "model.safetensors"
# Matches the names of settings that count blocks or experts, such as n_layer, num_hidden_layers, depths and
# num_local_experts, but not block_size.
_COUNTS = re.compile(r"(?:.*\.)?(?:(?:n|num)_\w*|\w*)(?:layers?|blocks|depths?|experts?|layer_types)", re.IGNORECASE)


def refuse_odd_files(folder: Path) -> None:
    """Raise `UserError` if files in a model's folder are too large or refer to files outside the folder."""
    for file in sorted(folder.glob("*.json")):
        largest = _LARGEST_CONFIG if file.name in _CONFIGS else _LARGEST_JSON
        if file.stat().st_size > largest:
            raise UserError(f"{file} is larger than {largest >> 20} MiB; download the model again")
        if file.name.endswith(".index.json"):
            _refuse_outside(file)


def _refuse_outside(index: Path) -> None:
    """Raise `UserError` if a weight index names a file outside its folder."""
    for name in _files_in(index):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise UserError(f"{index} names weights outside its folder, {show(name)}; download the model again")


def _files_in(index: Path) -> set[str]:
    """Return the file names in a weight index, or an empty set if the index is missing or invalid."""
    names = (read_json(index, dict[str, Any]) or {}).get("weight_map")
    return set(map(str, names.values())) if isinstance(names, dict) else set()


def refuse_odd_config(config: Mapping[str, Any], folder: Path, *, allows_code: bool) -> None:
    """Raise `UserError` if a configuration asks for too many modules, or for code from the hub that is not allowed."""
    n_weights = _n_weights(folder)
    for name, value in _facts(config):
        asks_for_code = ("implementation" in name and "/" in str(value)) or (name.endswith("use_kernels") and value)
        if asks_for_code and not allows_code:
            wants = f"its configuration requires code from the hub ({name} = {show(value)})"
            raise UserError(f"{wants}; remove this setting, or set model.remote_code = true if you trust its author")
        if not _COUNTS.fullmatch(name) or not isinstance(value, int):
            continue
        is_expert = "expert" in name.lower()
        most = _MOST_EXPERTS if is_expert else _MOST_LAYERS
        if value > most:
            raise UserError(f"its configuration has {name} = {value:,}, but no model has more than {most:,}")
        if not is_expert and 0 < n_weights < value:
            files = f"its files contain {n_weights:,} weights"
            raise UserError(f"its configuration has {name} = {value:,}, but {files}; download the model again")


def _facts(config: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each setting, including the settings of nested models such as a vision model."""
    for name, value in config.items():
        if isinstance(value, Mapping) and depth < 4:
            # A nested model may have its own setting for an implementation from the hub.
            yield from ((f"{name}.{inner}", one) for inner, one in _facts(value, depth + 1))
        elif isinstance(value, list) and _COUNTS.fullmatch(str(name)):
            yield str(name), max([len(value), *(one for one in value if isinstance(one, int))])
        else:
            yield str(name), value


def _n_weights(folder: Path) -> int:
    """Return the number of tensors in a model's safetensors files, or 0 if unknown."""
    # A folder may also contain other safetensors files, such as an adapter or an SAE for the model.
    names, n = {_WEIGHTS} if (folder / _WEIGHTS).exists() else _files_in(folder / f"{_WEIGHTS}.index.json"), 0
    try:
        for name in names:
            with safe_open(folder / name, "pt") as tensors:
                n += len(tensors.keys())
    except Exception:
        # Loading the weights will report the error.
        return 0
    return n

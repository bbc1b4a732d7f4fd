"""Activations in safetensors or .npy shards, memory-mapped: only the rows of a batch are read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import IndexedSource, Indices
from trainer.contract.json_file import read_json
from trainer.contract.settings.shards import Shard, ShardSet, inspect_shards
from trainer.contract.settings.sources import ShardKnobs

# numpy has no bfloat16: two-byte values travel as integers and are reinterpreted as what they are.
_DTYPES = {
    "F16": (np.int16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
    "F32": (np.float32, torch.float32),
}


class Shards(IndexedSource):
    """All shards of a folder as one long [n_tokens, d_in], and those of another folder as their targets.

    Raises `JobFileError` naming data.path or data.target_path.
    """

    def __init__(self, *, path: str, target_path: str | None = None) -> None:
        self.d_in, self.d_out, _ = ShardKnobs(path, target_path).shape()
        shard_set = inspect_shards(path)
        self.n_tokens = shard_set.n_tokens
        self.place = path if target_path is None else f"{path} with targets in {target_path}"
        self.meta = _read_meta(shard_set.shards[0].file.parent / "meta.json")
        self._inputs = _Mapped(shard_set)
        self._targets = None if target_path is None else self._mapped_targets(target_path)

    def _mapped_targets(self, path: str) -> _Mapped:
        shard_set = inspect_shards(path)
        self.meta["hook_name_out"] = _read_meta(shard_set.shards[0].file.parent / "meta.json").get("hook_name")
        return _Mapped(shard_set)

    def rows(self, indices: Indices) -> Tensor:
        return self._inputs.rows(np.sort(indices))

    def pairs(self, indices: Indices) -> tuple[Tensor, Tensor]:
        indices = np.sort(indices)
        x = self._inputs.rows(indices)
        return x, x if self._targets is None else self._targets.rows(indices)

    def name_of(self, index: int) -> str:
        name = self._inputs.name_of(index)
        return name if self._targets is None else f"{name} or its target, {self._targets.name_of(index)}"


class _Mapped:
    """The rows of a set of shards, numbered through."""

    def __init__(self, shard_set: ShardSet) -> None:
        self._mapped = [_map(shard) for shard in shard_set.shards]
        self._dtypes = [_DTYPES[shard.dtype][1] for shard in shard_set.shards]
        self._names = [shard.file.name for shard in shard_set.shards]
        self._starts = np.cumsum([0] + [shard.n_tokens for shard in shard_set.shards])

    def rows(self, indices: Indices) -> Tensor:
        """Read rows [n, d] by ascending numbers, in file order, which a disk serves several times faster."""
        stretches = enumerate(itertools.pairwise(np.searchsorted(indices, self._starts)))
        parts = [self._read(number, indices[first:last]) for number, (first, last) in stretches if last > first]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def name_of(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"row {index - self._starts[number]} of {self._names[number]}"

    def _read(self, number: int, indices: Indices) -> Tensor:
        values = self._mapped[number][indices - self._starts[number]]
        return torch.from_numpy(values).view(self._dtypes[number])


def _map(shard: Shard) -> np.ndarray[Any, Any]:
    return np.memmap(shard.file, _DTYPES[shard.dtype][0], "r", shard.offset, (shard.n_tokens, shard.d_in))


def _read_meta(file: Path) -> dict[str, Any]:
    """Return what the extraction noted beside the shards; nothing where there is no such note."""
    return read_json(file, dict[str, Any]) or {}

"""Activations in shards, memory-mapped: only the rows of a batch are read."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.activations.base import IndexedSource, Indices
from trainer.activations.parquet import decode
from trainer.activations.side_by_side import SideBySide
from trainer.contract.errors import JobFileError, Problem
from trainer.contract.json_file import read_json
from trainer.contract.settings.shards import Shard, ShardSet
from trainer.contract.settings.sources import Paths, ShardKnobs, each, inspect_sets
from trainer.contract.wording import join_words

Bytes = NDArray[np.uint8]
# numpy has no bfloat16: two-byte values travel as integers and are reinterpreted as what they are.
_DTYPES = {
    "F16": (np.int16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
    "F32": (np.float32, torch.float32),
}


class Shards(IndexedSource):
    """All shards of a folder, or of several, as one long [n_tokens, d_in], and those of others as their targets.

    Raises `JobFileError` naming data.path, data.target_path or data.weights.
    """

    def __init__(
        self,
        *,
        path: Paths,
        target_path: Paths | None = None,
        weights: list[float] | None = None,
        hook: str | None = None,
    ) -> None:
        knobs = ShardKnobs(path, target_path, weights, hook)
        self.d_in, self.d_out, _ = knobs.shape()
        sets = inspect_sets(knobs.folders, "data.path")
        self.sizes, self.weights = [one.n_tokens for one in sets], weights
        self.n_tokens = sum(self.sizes)
        targets = None if target_path is None else join_words(each(target_path))
        self.place = knobs.place if targets is None else f"{knobs.place} with targets in {targets}"
        self.meta = _meta_of(sets)
        self._inputs = _Mapped(sets, "data.path")
        self._targets = None if target_path is None else self._mapped_targets(target_path)

    def _mapped_targets(self, paths: Paths) -> _Mapped:
        field = "data.target_path"
        sets = inspect_sets(paths, field)
        self.meta["hook_name_out"] = _meta_of(sets).get("hook_name")
        return _Mapped(sets, field)

    def beside(self, others: Sequence[Shards]) -> SideBySide:
        return SideBySide([self, *others])

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
    """The rows of sets of shards, numbered through."""

    def __init__(self, sets: Sequence[ShardSet], field: str) -> None:
        self._shards = [shard for one in sets for shard in one.shards]
        contents = {file: _map(shard, field) for file, shard in {shard.file: shard for shard in self._shards}.items()}
        self._mapped = [_rows_of(shard, contents[shard.file], field) for shard in self._shards]
        self._starts = np.cumsum([0] + [shard.n_tokens for shard in self._shards])
        self._are_several = len(sets) > 1

    def rows(self, indices: Indices) -> Tensor:
        """Read rows [n, d] by ascending numbers, in file order, which a disk serves several times faster."""
        stretches = enumerate(itertools.pairwise(np.searchsorted(indices, self._starts)))
        parts = [self._read(number, indices[first:last]) for number, (first, last) in stretches if last > first]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def name_of(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard = self._shards[number]
        name = f"{shard.file.parent.name}/{shard.file.name}" if self._are_several else shard.file.name
        return f"row {shard.first_row + index - self._starts[number]} of {name}"

    def _read(self, number: int, indices: Indices) -> Tensor:
        values = self._mapped[number][indices - self._starts[number]]
        return torch.from_numpy(values).view(_DTYPES[self._shards[number].dtype][1])


def _map(shard: Shard, field: str) -> Bytes:
    return np.memmap(shard.file, np.uint8, "r") if shard.column is None else decode(shard, field)


def _rows_of(shard: Shard, content: Bytes, field: str) -> NDArray[Any]:
    """Return the rows of a shard, in its file; raise `JobFileError` where lists differ in length."""
    if shard.lists is not None:
        begin, size = shard.lists
        ends = content[begin : begin + size * (shard.n_tokens + 1)].view(f"<i{size}")
        if ends[0] != 0 or (np.diff(ends) != shard.d_in).any():
            raise JobFileError(
                [Problem(field, f"{shard.file} has lists that differ in length; leave the odd ones out")]
            )
    dtype = np.dtype(_DTYPES[shard.dtype][0])
    n_bytes = shard.n_tokens * shard.d_in * dtype.itemsize
    return content[shard.offset : shard.offset + n_bytes].view(dtype).reshape(shard.n_tokens, shard.d_in)


def _read_meta(file: Path) -> dict[str, Any]:
    """Return what the extraction noted beside the shards; nothing where there is no such note."""
    return read_json(file, dict[str, Any]) or {}


def _meta_of(sets: Sequence[ShardSet]) -> dict[str, Any]:
    """Return what the notes beside several sets of shards agree on."""
    metas = [_read_meta(one.shards[0].file.parent / "meta.json") for one in sets]
    return {key: value for key, value in metas[0].items() if all(meta.get(key) == value for meta in metas)}

"""Activations in shards, memory-mapped: only the rows of a batch are read."""

from __future__ import annotations

import itertools
import mmap
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.activations.base import Empty, IndexedSource, Indices, Pair, empty_rows
from trainer.activations.parquet import decode
from trainer.activations.side_by_side import SideBySide
from trainer.activations.texts import Texts
from trainer.contract.errors import JobFileError, Problem, UserError
from trainer.contract.json_file import read_json
from trainer.contract.machine_memory import machine_memory
from trainer.contract.runs.data_record import DataRecord, cut_sentence
from trainer.contract.settings.shards import Shard, ShardSet, documents_in
from trainer.contract.settings.sources import Paths, ShardKnobs, each, inspect_sets
from trainer.contract.wording import join_words

Bytes = NDArray[np.uint8]
# numpy has no bfloat16: two-byte values travel as integers and are reinterpreted as what they are.
_DTYPES = {
    "F16": (np.int16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
    "F32": (np.float32, torch.float32),
    "F64": (np.float64, torch.float64),
}

_NO_TEXT = -(2**63)
# A key of meta.json that only our own extraction writes.
_OF_EXTRACTION = "documents_share_contexts"
# Rows that are read at one place of shuffled shards: a disk serves them as fast as the whole file, and a batch of 4096
# is still of 64 places.
_RUN = 64


class ShardCutError(UserError):
    """A shard became shorter while it was read."""


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
        targets = knobs.targets
        self.place = knobs.place if targets is None else f"{knobs.place} with targets in {join_words(each(targets))}"
        self.meta = _meta_of(sets)
        self.notes = [note for one in sets for note in one.notes]
        if self.meta.get("shuffled") is True:
            self.run = _RUN
        self._sets, self._target_sets, self._target_field = sets, None, knobs.target_field
        if targets is not None:
            self._target_sets = inspect_sets(targets, knobs.target_field)
            meta = _meta_of(self._target_sets)
            of_targets = {"hook_name": "hook_name_out", "output_module": "output_module_out", "mean": "mean_out"}
            self.meta |= {ours: meta.get(theirs) for theirs, ours in of_targets.items()}
        self._map(self._sets, self._target_sets)

    def _map(self, sets: list[ShardSet], targets: list[ShardSet] | None) -> None:
        self.texts, alone = _texts_of(sets, self.split_sizes), self.run == 1
        self.usual_hold_out = "texts" if self.texts else "rows" if self.run > 1 else "blocks"
        self._inputs = _Mapped(sets, "data.path", alone=alone)
        self._targets = None if targets is None else _Mapped(targets, self._target_field, alone=alone)

    def continue_from(self, before: DataRecord) -> None:
        n = len(self._sets)
        self.split_sizes = [folder.split_rows for folder in before[:n]]
        targets = None if self._target_sets is None else _in_order(self._target_sets, before[n:])
        self._map(_in_order(self._sets, before[:n]), targets)

    def beside(self, others: Sequence[Shards]) -> SideBySide:
        return SideBySide([self, *others])

    def read_by_all_threads(self) -> None:
        for mapped in (self._inputs, self._targets):
            if mapped is not None:
                mapped.read_by_all_threads()

    def rows(self, indices: Indices) -> Tensor:
        return self._inputs.rows(_sorted(indices))

    def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        indices = _sorted(indices)
        x = self._inputs.rows(indices, empty)
        return x, x if self._targets is None else self._targets.rows(indices, empty)

    def name_of(self, index: int) -> str:
        name = self._inputs.name_of(index)
        return name if self._targets is None else f"{name} or its target, {self._targets.name_of(index)}"


class _Mapped:
    """The rows of sets of shards, numbered through; `alone`: each is read by itself, not with those beside it."""

    def __init__(self, sets: Sequence[ShardSet], field: str, *, alone: bool) -> None:
        self._shards = [shard for one in sets for shard in one.shards]
        contents = {file: _content(shard, field) for file, shard in {one.file: one for one in self._shards}.items()}
        if alone and sum(map(len, contents.values())) > machine_memory().total_bytes // 2:
            _read_alone(contents.values())
        self._mapped = [_rows_of(shard, contents[shard.file], field) for shard in self._shards]
        self._maps = [_map_of(contents[shard.file]) for shard in self._shards]
        self._field = field
        self._starts = np.cumsum([0] + [shard.n_tokens for shard in self._shards])
        self._are_several = len(sets) > 1
        dtypes = {_DTYPES[shard.dtype][1] for shard in self._shards}
        self._dtype = dtypes.pop() if len(dtypes) == 1 and torch.float64 not in dtypes else torch.float32
        # The same rows as tensors, where all threads read.
        self._tensors: list[Tensor] = []

    def read_by_all_threads(self) -> None:
        with warnings.catch_warnings():
            # That they cannot be written to is as it should be.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            self._tensors = [torch.from_numpy(rows) for rows in self._mapped]

    def rows(self, indices: Indices, empty: Empty = empty_rows) -> Tensor:
        """Read rows [n, d] by ascending numbers, in file order, which a disk serves several times faster."""
        rows = empty(len(indices), self._shards[0].d_in, self._dtype)
        for number, (first, last) in enumerate(itertools.pairwise(np.searchsorted(indices, self._starts))):
            if last > first:
                self._read(number, indices[first:last], rows[first:last])
        return rows

    def name_of(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard = self._shards[number]
        name = f"{shard.file.parent.name}/{shard.file.name}" if self._are_several else shard.file.name
        return f"row {shard.first_row + index - self._starts[number]} of {name}"

    def _read(self, number: int, indices: Indices, into: Tensor) -> None:
        """Read rows of a shard into their place in a batch; during a step on the CPU only this thread reads.

        Raise `ShardCutError` if the file has become shorter: reading beyond its end would kill the process by SIGBUS.
        """
        mapped = self._maps[number]
        if mapped is not None and (size := mapped.size()) < len(mapped):
            file = self._shards[number].file
            raise ShardCutError(f"{self._field}: {cut_sentence(file, size, len(mapped))}")
        rows, places = self._mapped[number], indices - self._starts[number]
        dtype = _DTYPES[self._shards[number].dtype][1]
        if self._tensors and dtype == into.dtype:
            whole = self._tensors[number]
            torch.index_select(whole, 0, torch.from_numpy(places), out=into.view(whole.dtype))
        elif dtype == into.dtype:
            np.take(rows, places, axis=0, out=into.view(torch.uint8).numpy().view(rows.dtype), mode="clip")
        else:
            into.copy_(torch.from_numpy(rows[places]).view(dtype))


def _in_order(sets: list[ShardSet], before: DataRecord) -> list[ShardSet]:
    """Return the shards of each folder; shards that the run was trained on come first, in their old order."""
    return [one.beginning_with(folder.names) for one, folder in zip(sets, before, strict=True)]


def _sorted(indices: Indices) -> Indices:
    # By a sort that takes runs as they are: a tenth of the time of another, which was a seventh of the reading.
    return np.sort(indices, kind="stable")


def _content(shard: Shard, field: str) -> Bytes:
    return np.memmap(shard.file, np.uint8, "r") if shard.column is None else decode(shard, field)


def _map_of(content: Bytes) -> mmap.mmap | None:
    """Return the mapping of a file's content; None where it was decoded into memory."""
    return content.base if isinstance(content.base, mmap.mmap) else None


def _read_alone(contents: Iterable[Bytes]) -> None:
    """Have the system read the 4 KiB of a row from the disk and not the 128 KiB around it, which memory cannot keep."""
    for content in contents:
        if mapped := _map_of(content):
            mapped.madvise(mmap.MADV_RANDOM)


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


def _texts_of(sets: Sequence[ShardSet], split_sizes: Sequence[int]) -> list[Texts]:
    """Return the texts of each set; an empty list if a shard that held-out rows are chosen from does not record them.

    Rows of later shards that do not record their texts belong to no held-out text.
    """
    texts = []
    for one, n_split in zip(sets, split_sizes or [one.n_tokens for one in sets], strict=True):
        parts, first = list[NDArray[Any]](), 0
        for shard in one.shards:
            at = documents_in(shard)
            if at is None and first < n_split:
                return []
            parts.append(
                np.memmap(shard.file, at.dtype, "r", at.offset, (shard.n_tokens,))
                if at
                else np.broadcast_to(np.array(_NO_TEXT), shard.n_tokens)
            )
            first += shard.n_tokens
        meta = _read_meta(one.shards[0].file.parent / "meta.json")
        # An extraction numbers all its texts in one sequence, even if several processes write.
        texts.append(Texts(parts, numbered_through=_OF_EXTRACTION in meta))
    return texts


def _read_meta(file: Path) -> dict[str, Any]:
    """Return what the extraction noted beside the shards; nothing where there is no such note."""
    return read_json(file, dict[str, Any]) or {}


def _meta_of(sets: Sequence[ShardSet]) -> dict[str, Any]:
    """Return what the notes beside several sets of shards agree on."""
    metas = [_read_meta(one.shards[0].file.parent / "meta.json") for one in sets]
    return {key: value for key, value in metas[0].items() if all(meta.get(key) == value for meta in metas)}

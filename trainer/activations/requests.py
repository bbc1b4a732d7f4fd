"""Reads hidden states stored by an inference engine; each file holds one request, which is held out as a whole."""

from __future__ import annotations

import functools
import resource
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.activations.base import Empty, IndexedSource, Indices, Pair, empty_rows
from trainer.activations.shards import DTYPES, ShardCutError
from trainer.activations.texts import Texts
from trainer.contract.json_file import read_json
from trainer.contract.runs.data_record import DataRecord, cut_sentence
from trainer.contract.settings.requests import RequestFile, RequestSettings
from trainer.contract.settings.shards import NUMBERS, Shard, shards_at

# The most files that are mapped at once; Linux allows a process 65,530 maps by default. A map keeps its file open.
_MOST_MAPS = 2**14


class RequestRows(IndexedSource):
    """The rows in all files, numbered in the order of the files' names; a file is one text."""

    usual_hold_out = "texts"

    def __init__(self, *, path: str, layer: int | None = None) -> None:
        settings = RequestSettings(path, layer)
        files = settings.files()
        self.d_in, self.place = files[0].d_in, settings.place
        self.n_tokens = sum(one.n_tokens for one in files)
        self._root, _ = shards_at(path)
        self.meta = read_json(self._root / "meta.json", dict[str, Any]) or {}
        dtypes = {DTYPES[one.dtype][1] for one in files}
        self._dtype = dtypes.pop() if len(dtypes) == 1 and torch.float64 not in dtypes else torch.float32
        most_open, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        n_maps = _MOST_MAPS if most_open == resource.RLIM_INFINITY else min(_MOST_MAPS, most_open // 2)
        self._mapped = functools.lru_cache(n_maps)(_mapped)
        self._number(files)

    def _number(self, files: Sequence[RequestFile]) -> None:
        self._files = files
        counts = [one.n_tokens for one in files]
        self._starts = np.cumsum([0, *counts])
        self.sizes = [self.n_tokens]
        self.texts = [Texts([np.repeat(np.arange(len(files), dtype=np.int32), counts)])]

    def continue_from(self, before: DataRecord) -> None:
        # Files that the engine wrote since the run started come last.
        places = {name: place for place, name in enumerate(before[0].names)}
        files = sorted(self._files, key=lambda one: places.get(one.file.name, len(places)))
        self._number(files)
        # The record counts the rows of all layers.
        n_all = sum(shard.rows for shard in before[0].shards)
        n_known = sum(one.n_tokens for one in files if one.file.name in places)
        self.split_sizes = [before[0].split_rows * n_known // max(1, n_all)]

    def rows(self, indices: Indices) -> Tensor:
        return self.pairs(indices)[0]

    def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        indices = np.sort(indices, kind="stable")
        rows = empty(len(indices), self.d_in, self._dtype)
        for number, first, last in self._by_file(indices):
            one = self._files[number]
            stored = self._open(one)[indices[first:last] - self._starts[number]]
            rows[first:last].copy_(torch.from_numpy(stored).view(DTYPES[one.dtype][1]))
        return rows, rows

    def token_ids(self, indices: Indices) -> Indices | None:
        if any(one.tokens is None for one in self._files):
            return None
        found = [
            self.tokens_of(self._files[number])[indices[first:last] - self._starts[number]]
            for number, first, last in self._by_file(indices)
        ]
        return np.concatenate([np.zeros(0, np.int64), *found])

    def tokens_of(self, one: RequestFile) -> Indices:
        """Return a request's token ids."""
        assert one.tokens is not None
        begin, dtype = one.tokens[0], np.dtype(NUMBERS[one.tokens[1]])
        content = self._mapped(one.file)
        return content[begin : begin + one.n_tokens * dtype.itemsize].view(dtype).astype(np.int64)

    def first_shards(self) -> Sequence[Shard]:
        return [Shard(one.offset, one.n_tokens, one.d_in, one.dtype, file=one.file) for one in self._files]

    def name_of(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"row {index - self._starts[number]} of {self._files[number].file.name}"

    def _by_file(self, indices: Indices) -> Sequence[tuple[int, int, int]]:
        """Return each file among ascending rows, with the range of its rows in `indices`."""
        numbers = np.searchsorted(self._starts, indices, side="right") - 1
        files, begins = np.unique(numbers, return_index=True)
        ends = [*begins[1:].tolist(), len(indices)]
        return list(zip(files.tolist(), begins.tolist(), ends, strict=True))

    def _open(self, one: RequestFile) -> NDArray[Any]:
        """Return a view [n_tokens, d_in] of a request's rows; raise `ShardCutError` if its file was truncated."""
        content, dtype = self._mapped(one.file), np.dtype(DTYPES[one.dtype][0])
        if (size := one.file.stat().st_size) < len(content):
            raise ShardCutError(f"data.path: {cut_sentence(one.file, size, len(content))}")
        return np.ndarray((one.n_tokens, one.d_in), dtype, content, one.offset, (one.stride, dtype.itemsize))


def _mapped(file: Any) -> NDArray[np.uint8]:
    return np.memmap(file, np.uint8, "r")

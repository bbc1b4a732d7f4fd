"""Activations in safetensors shards, memory-mapped: only the rows of a batch are read."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.activations.base import Indices, Source
from trainer.contract.shards import Shard, inspect_shards

# numpy has no bfloat16: two-byte values travel as integers and are reinterpreted as what they are.
_DTYPES = {
    "F16": (np.int16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
    "F32": (np.float32, torch.float32),
}


class Shards(Source):
    """All .safetensors shards of a folder as one long [n_tokens, d_in]; raises `JobFileError` naming data.path."""

    def __init__(self, *, path: str) -> None:
        found = inspect_shards(path)
        self.place, self.d_in, self.n_tokens = path, found.d_in, found.n_tokens
        self.meta = _read_meta(found.shards[0].file.parent / "meta.json")
        self._mapped = [_map(shard) for shard in found.shards]
        self._dtypes = [_DTYPES[shard.dtype][1] for shard in found.shards]
        self._names = [shard.file.name for shard in found.shards]
        self._starts = np.cumsum([0] + [shard.n_tokens for shard in found.shards])

    def rows(self, indices: Indices) -> Tensor:
        """Read shard by shard in file order, which a disk serves several times faster than a random order."""
        indices = np.sort(indices)
        stretches = enumerate(itertools.pairwise(np.searchsorted(indices, self._starts)))
        parts = [self._read(number, indices[first:last]) for number, (first, last) in stretches if last > first]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def name_of(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        return f"row {index - self._starts[number]} of {self._names[number]}"

    def _read(self, number: int, indices: Indices) -> Tensor:
        found = self._mapped[number][indices - self._starts[number]]
        return torch.from_numpy(found).view(self._dtypes[number])


def _map(shard: Shard) -> np.ndarray[Any, Any]:
    return np.memmap(shard.file, _DTYPES[shard.dtype][0], "r", shard.offset, (shard.n_tokens, shard.d_in))


def _read_meta(file: Path) -> dict[str, Any]:
    """What the extraction noted beside the shards; nothing where there is no such note."""
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return meta if isinstance(meta, dict) else {}

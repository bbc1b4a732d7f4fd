"""Rows of several hooks, shuffled in blocks and written as shards, in the same order for each hook."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from trainer.checkpoints.atomic_folder import not_written, sync, write_tensors
from trainer.contract.paths import file_mode, private_folder
from trainer.contract.settings.shards import TENSOR

# Rows whose sums are taken at once: float64 takes up to eight times the memory of what is stored.
_ROWS_AT_ONCE = 4096
# Of a row's token, position and document.
_BYTES_BESIDE = 12


class Origin(NamedTuple):
    """Of each row: its token, its position in the document's piece, and the document's number; int32 [n] each."""

    token_ids: Tensor
    positions: Tensor
    document: Tensor


class Sums(msgspec.Struct):
    """Sums over all rows of a hook, in float64: of each dimension, and of the squares of each."""

    n: int
    total: list[float]
    squares: list[float]

    @property
    def mean(self) -> list[float]:
        return [one / self.n for one in self.total]

    @property
    def variance(self) -> float:
        """The sum of the variances of all dimensions."""
        return sum(self.squares) / self.n - sum(one**2 for one in self.mean)


class ShardFile(msgspec.Struct, frozen=True):
    """A finished shard: its name, rows and SHA-256."""

    name: str
    n_tokens: int
    sha256: str


class Blocks:
    """Rows that wait until there are enough for a shard of each hook, which are then shuffled and written."""

    def __init__(self, folders: Sequence[Path], shard_rows: int, seed: int, rank: int | None = None) -> None:
        self._folders, self.shard_rows, self._seed, self._rank = folders, shard_rows, seed, rank
        self._waiting: list[tuple[list[Tensor], Origin]] = []
        self.n_waiting = 0

    def add(self, rows: list[Tensor], origin: Origin) -> None:
        """Take rows [n, d_in] of each hook, which are of the same tokens."""
        self._waiting.append(([one.cpu() for one in rows], origin))
        self.n_waiting += len(origin.token_ids)

    @property
    def is_full(self) -> bool:
        return self.n_waiting >= self.shard_rows

    def row_bytes(self, rows: list[Tensor]) -> int:
        """Return the bytes that a row of all hooks takes on the disk."""
        return sum(of_hook.shape[1] * of_hook.element_size() + _BYTES_BESIDE for of_hook in rows)

    def write(self, number: int) -> list[tuple[ShardFile, Sums]]:
        """Write the next shard of each hook and return them with the sums of their rows.

        Raise `UserError` where the disk does not take one: then none of this number counts.
        """
        n = min(self.n_waiting, self.shard_rows)
        name = f"shard-{number:05d}" if self._rank is None else f"shard-{number:05d}-{self._rank:03d}"
        order = order_of_shard(self._seed, name, n)
        origin = Origin(*(self._first(n, [of[field] for _, of in self._waiting])[order] for field in range(3)))
        written = []
        for hook, folder in enumerate(self._folders):
            rows = self._first(n, [parts[hook] for parts, _ in self._waiting])[order]
            file = folder / f"{name}.safetensors"
            written.append((_write(file, {TENSOR: rows, **origin._asdict()}), _sums(rows)))
        self._forget(n)
        return written

    def _first(self, n: int, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))[:n]

    def _forget(self, n: int) -> None:
        left: list[tuple[list[Tensor], Origin]] = []
        for rows, origin in self._waiting:
            gone = min(n, len(origin.token_ids))
            n -= gone
            if gone < len(origin.token_ids):
                left.append(([one[gone:] for one in rows], Origin(*(one[gone:] for one in origin))))
        self._waiting = left
        self.n_waiting = sum(len(origin.token_ids) for _, origin in left)


def order_of_shard(seed: int, name: str, n: int) -> Tensor:
    """Return the order, [n], in which a shard's rows are stored: row i is that of number `order[i]` in the text.

    The numbers in its name decide: its own, and that of the process where several write.
    """
    numbers = [int(one) for one in re.findall("[0-9]+", name)]
    return torch.from_numpy(np.random.default_rng([seed, *numbers]).permutation(n))


def _write(file: Path, tensors: dict[str, Tensor]) -> ShardFile:
    """Write a safetensors file whole or not at all, and on the disk; return its name, rows and sum."""
    temporary = file.with_name(f".{file.name}.new")
    try:
        private_folder(file.parent)
        temporary.unlink(missing_ok=True)
        write_tensors(temporary, tensors)
        temporary.chmod(file_mode(file.parent))
        with temporary.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        os.replace(temporary, file)
        sync(file.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise not_written(file, error.strerror or str(error), error.errno) from None
    except Exception as error:
        # safetensors reports a full disk as an error of its own.
        temporary.unlink(missing_ok=True)
        raise not_written(file, str(error)) from error
    return ShardFile(file.name, len(tensors[TENSOR]), digest)


def _sums(rows: Tensor) -> Sums:
    total, squares = (torch.zeros(rows.shape[1], dtype=torch.float64) for _ in range(2))
    for part in rows.split(_ROWS_AT_ONCE):
        exact = part.double()
        total += exact.sum(0)
        squares += exact.square().sum(0)
    return Sums(len(rows), total.tolist(), squares.tolist())


def add_sums(first: Sums | None, second: Sums) -> Sums:
    """Return the sums over the rows of both."""
    if first is None:
        return second
    pairs = zip((first.total, first.squares), (second.total, second.squares), strict=True)
    return Sums(first.n + second.n, *([a + b for a, b in zip(*pair, strict=True)] for pair in pairs))

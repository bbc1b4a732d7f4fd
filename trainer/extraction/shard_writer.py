"""Rows of several hooks, shuffled in blocks and written as shards, in the same order for each hook.

All that is done with every byte of a row is done beside the reading, by threads that hold no lock of Python's: a row is
copied once as it comes, and once in its new place, from where its piece of a shard is written, hashed and summed at the
same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from trainer.checkpoints.atomic_folder import not_written, sync
from trainer.contract.paths import file_mode, private_folder
from trainer.contract.settings.shards import TENSOR

# Bytes of a row, [n, bytes], whatever its type.
Raw = NDArray[np.uint8]
# Of a shard, what is put in its new order, hashed, summed and written at once.
_PIECE_BYTES = 2**22
# Rows whose sums are taken at once, few enough that they stay in a core's cache in float64: of 4096, which do not, the
# sums took half of the time of an extraction without its model.
_ROWS_AT_ONCE = 256
# Numbers that torch converts in the thread that asks: of more it starts threads for each thread that does.
_NUMBERS_ALONE = 2**15 - 1
# Of a row's token, position and document.
_BYTES_BESIDE = 12
_MOST_THREADS = 16


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


class Block:
    """Rows of each hook for one shard, in the order in which they came."""

    def __init__(self, memory: list[Raw], dtypes: list[torch.dtype]) -> None:
        self.memory, self.dtypes, self.n = memory, dtypes, 0
        self.origins: list[Origin] = []
        # Rows that are still being copied.
        self.coming: list[Future[None]] = []

    @property
    def n_free(self) -> int:
        return len(self.memory[0]) - self.n

    def origin(self) -> Origin:
        """Return where its rows come from."""
        return Origin(*(torch.cat([of[field] for of in self.origins]) for field in range(3)))


class ShardsBegun:
    """A shard of each hook that is being written."""

    def __init__(self, writing: list[Future[tuple[ShardFile, Sums]]], free: Callable[[], object]) -> None:
        self._writing, self._free = writing, free

    @property
    def is_done(self) -> bool:
        """Whether `end` would not wait."""
        return all(one.done() for one in self._writing)

    def end(self) -> list[tuple[ShardFile, Sums]]:
        """Wait for the shards, and return them with the sums of their rows; called once.

        Raise `UserError` where the disk does not take one: then none of them counts.
        """
        wait(self._writing)
        self._free()
        return [one.result() for one in self._writing]


class Blocks:
    """Rows that wait until there are enough for a shard of each hook, which are then shuffled and written."""

    def __init__(self, folders: Sequence[Path], shard_rows: int, seed: int, rank: int | None = None) -> None:
        self._folders, self.shard_rows, self._seed, self._rank = folders, shard_rows, seed, rank
        self._waiting: deque[Block] = deque()
        # Memory of shards that are written, for those that come.
        self._free: list[list[Raw]] = []
        self.n_waiting = 0
        # Those that write wait for those that copy, hash and sum, so that these are others.
        self._writers = ThreadPoolExecutor(min(len(folders), _MOST_THREADS), "shard-writer")
        self._workers = ThreadPoolExecutor(min(_MOST_THREADS, 1 + len(os.sched_getaffinity(0))), "shard-worker")

    def add(self, rows: list[Tensor], origin: Origin, chosen: Tensor | None = None) -> None:
        """Take rows [n, d_in] of each hook, which are of the same tokens and nobody changes any more.

        Of all rows, those at `chosen` [n] where it is given: of these is the origin.
        """
        done, n = 0, len(origin.token_ids)
        raws = [_raw(one) for one in rows] if n else []
        while done < n:
            block = self._block(rows)
            last = min(n, done + block.n_free)
            for raw, memory in zip(raws, block.memory, strict=True):
                at = slice(done, last) if chosen is None else chosen[done:last].numpy()
                block.coming.append(self._workers.submit(_copy, raw, at, memory[block.n : block.n + last - done]))
            block.origins.append(Origin(*(one[done:last] for one in origin)))
            block.n += last - done
            done = last
        self.n_waiting += n

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
        return self.begin_write(number).end()

    def begin_write(self, number: int) -> ShardsBegun:
        """Begin to write the next shard of each hook, whose memory is for other rows once that is ended."""
        block = self._waiting.popleft()
        self.n_waiting -= block.n
        name = f"shard-{number:05d}" if self._rank is None else f"shard-{number:05d}-{self._rank:03d}"
        order = order_of_shard(self._seed, name, block.n)
        origin = Origin(*(one[order] for one in block.origin()))
        files = [folder / f"{name}.safetensors" for folder in self._folders]
        writing = [
            self._writers.submit(self._write, file, block, hook, order, origin) for hook, file in enumerate(files)
        ]
        return ShardsBegun(writing, lambda: self._free.append(block.memory))

    def close(self) -> None:
        """Wait for what is being done, and end the threads."""
        self._writers.shutdown()
        self._workers.shutdown()

    def _block(self, rows: list[Tensor]) -> Block:
        """Return the block that the next row belongs to."""
        if not self._waiting or not self._waiting[-1].n_free:
            widths = [of_hook.shape[1] * of_hook.element_size() for of_hook in rows]
            memory = self._free.pop() if self._free else [np.empty((self.shard_rows, one), np.uint8) for one in widths]
            self._waiting.append(Block(memory, [of_hook.dtype for of_hook in rows]))
        return self._waiting[-1]

    def _write(self, file: Path, block: Block, hook: int, order: Tensor, origin: Origin) -> tuple[ShardFile, Sums]:
        for one in block.coming:
            one.result()
        dtype, raw = block.dtypes[hook], block.memory[hook]
        pieces, sums = _pieces(raw, order.numpy()), RunningSums(dtype, raw.shape[1] // dtype.itemsize)
        like = {TENSOR: torch.empty(1, len(sums.total), dtype=dtype), **origin._asdict()}
        return _write(file, like, pieces, sums, self._workers), sums.sums(block.n)


def _raw(rows: Tensor) -> Raw:
    raw: Raw = rows.cpu().contiguous().view(torch.uint8).numpy()
    return raw


def _copy(raw: Raw, at: Any, memory: Raw) -> None:
    """Copy rows, by a slice or by their numbers."""
    if isinstance(at, slice):
        np.copyto(memory, raw[at])
    else:
        np.take(raw, at, axis=0, out=memory, mode="clip")


def _pieces(raw: Raw, order: NDArray[np.int64]) -> Iterator[Raw]:
    """Yield rows in an order, some at a time, each in the memory of the one before."""
    n = max(1, _PIECE_BYTES // raw.shape[1])
    memory = np.empty((min(n, len(order)), raw.shape[1]), np.uint8)
    for first in range(0, len(order), n):
        numbers = order[first : first + n]
        # Where it raises for a number that is none, it takes another copy.
        yield np.take(raw, numbers, axis=0, out=memory[: len(numbers)], mode="clip")


def order_of_shard(seed: int, name: str, n: int) -> Tensor:
    """Return the order, [n], in which a shard's rows are stored: row i is that of number `order[i]` in the text.

    The numbers in its name decide: its own, and that of the process where several write.
    """
    numbers = [int(one) for one in re.findall("[0-9]+", name)]
    return torch.from_numpy(np.random.default_rng([seed, *numbers]).permutation(n))


def _write(
    file: Path, like: dict[str, Tensor], pieces: Iterator[Raw], sums: RunningSums, workers: ThreadPoolExecutor
) -> ShardFile:
    """Write a safetensors file whole or not at all, and on the disk; return its name, rows and sum.

    Its tensors are those of `like`, but for the rows, which come in pieces.
    """
    temporary = file.with_name(f".{file.name}.new")
    digest, n = hashlib.sha256(), len(like["token_ids"])
    try:
        private_folder(file.parent)
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", buffering=0) as stream:
            names, header = _header(like, n)
            _write_all(stream, header, digest)
            for name in names:
                if name != TENSOR:
                    _write_all(stream, like[name].numpy(), digest)
                    continue
                for piece in pieces:
                    beside = [workers.submit(digest.update, piece.data), workers.submit(sums.add, piece)]
                    _write_all(stream, piece)
                    for one in beside:
                        one.result()
            os.fsync(stream.fileno())
        temporary.chmod(file_mode(file.parent))
        os.replace(temporary, file)
        sync(file.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise not_written(file, error.strerror or str(error), error.errno) from None
    return ShardFile(file.name, n, digest.hexdigest())


def _header(like: dict[str, Tensor], n: int) -> tuple[list[str], bytes]:
    """Return the names of the tensors in the order of a file of `n` rows of each, and what it begins with.

    Both are as safetensors has them in a file of one row.
    """
    small = save({name: one[:1].contiguous() for name, one in like.items()})
    table = json.loads(small[8 : 8 + int.from_bytes(small[:8], "little")])
    end = 0
    for facts in table.values():
        first, last = facts["data_offsets"]
        facts["shape"][0] = n
        facts["data_offsets"] = [end, end := end + n * (last - first)]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [*table], len(text).to_bytes(8, "little") + text


def _write_all(stream: Any, values: Any, digest: Any = None) -> None:
    """Write bytes, of which a call may take only some, and hash them."""
    left = memoryview(values).cast("B")
    if digest:
        digest.update(left)
    while left:
        left = left[stream.write(left) :]


class RunningSums:
    """Sums over rows that come in pieces, in float64."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        self._dtype = dtype
        self.total, self._squares = np.zeros(width), np.zeros(width)
        self._exact = np.empty((_ROWS_AT_ONCE, width))

    def add(self, raw: Raw) -> None:
        """Add rows by their bytes."""
        rows = torch.from_numpy(raw).view(self._dtype)
        for part in rows.split(_ROWS_AT_ONCE):
            exact = self._exact[: len(part)]
            at_once = max(1, _NUMBERS_ALONE // part.shape[1])
            for some, to in zip(part.split(at_once), torch.from_numpy(exact).split(at_once), strict=True):
                to.copy_(some)
            self.total += exact.sum(0)
            self._squares += np.einsum("ij,ij->j", exact, exact)

    def sums(self, n: int) -> Sums:
        """Return them as those of n rows."""
        return Sums(n, self.total.tolist(), self._squares.tolist())


def add_sums(first: Sums | None, second: Sums) -> Sums:
    """Return the sums over the rows of both."""
    if first is None:
        return second
    pairs = zip((first.total, first.squares), (second.total, second.squares), strict=True)
    return Sums(first.n + second.n, *([a + b for a, b in zip(*pair, strict=True)] for pair in pairs))

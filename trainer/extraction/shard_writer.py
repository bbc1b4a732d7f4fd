"""Shuffles blocks of rows and writes each block as a shard, in the same order for every hook.

Threads process the rows' bytes while the model runs, without holding Python's GIL. Each row is copied once when it
arrives and once into its shuffled position. Each piece of a shard is written, hashed and summed in parallel.
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

from trainer.activations.int8_rows import decoded, noise_of
from trainer.checkpoints.atomic_folder import not_written, sync
from trainer.contract.paths import file_mode, private_folder
from trainer.contract.settings.shards import INT8_MEAN, INT8_ROWS, TENSOR

# The raw bytes of rows of any dtype, as uint8 [n, n_bytes].
Raw = NDArray[np.uint8]
# The number of shard bytes to shuffle, hash, sum and write at a time.
_PIECE_BYTES = 2**22
# The number of rows to sum at a time, small enough to fit in a core's cache as float64. With 4096 rows, which do not
# fit in the cache, summing took half of the extraction time spent outside the model.
_ROWS_AT_ONCE = 256
# The largest number of values that torch converts in the calling thread; for more values, it starts threads.
_NUMBERS_ALONE = 2**15 - 1
# The total size, in bytes, of a row's token id, position, document number and place.
_BYTES_BESIDE = 20
_MOST_THREADS = 16


class RowOrigin(NamedTuple):
    """Each row's token id, position within its piece of a document, and document number, as int32 [n]."""

    token_ids: Tensor
    positions: Tensor
    document: Tensor


class StoredOrigin(NamedTuple):
    """The origin of each row as stored, with the row's `place` in the text, as int64 [n].

    The place identifies the row: extractions by other models that cut the same text into the same contexts give the
    same token the same place, even if they leave out different rows.
    """

    token_ids: Tensor
    positions: Tensor
    document: Tensor
    place: Tensor


class DimensionSums(msgspec.Struct):
    """The sum and sum of squares of each dimension over all rows at a hook, in float64.

    `noise` is the expected sum of the squared errors of int8 rows.
    """

    n: int
    total: list[float]
    squares: list[float]
    noise: float = 0.0

    @property
    def mean(self) -> list[float]:
        return [one / self.n for one in self.total]

    @property
    def variance(self) -> float:
        """The sum of the variances of all dimensions."""
        return sum(self.squares) / self.n - sum(one**2 for one in self.mean)


class ShardFile(msgspec.Struct, frozen=True):
    """A finished shard: its name, row count, SHA-256 and size."""

    name: str
    n_tokens: int
    sha256: str
    n_bytes: int = 0


class Block:
    """One shard's rows at each hook, in order of arrival."""

    def __init__(self, memory: list[Raw], dtypes: list[torch.dtype]) -> None:
        self.memory, self.dtypes, self.n = memory, dtypes, 0
        self.origins: list[StoredOrigin] = []
        # The copies of rows into `memory` that may still be in progress.
        self.coming: list[Future[None]] = []

    @property
    def n_free(self) -> int:
        return len(self.memory[0]) - self.n

    def origin(self) -> StoredOrigin:
        """Return the origins of all rows."""
        return StoredOrigin(*map(torch.cat, zip(*self.origins, strict=True)))


class ShardsBegun:
    """The shards that are being written, one per hook."""

    def __init__(self, writing: list[Future[tuple[ShardFile, DimensionSums]]], free: Callable[[], object]) -> None:
        self._writing, self._free = writing, free

    @property
    def is_done(self) -> bool:
        """Whether `end` would return without waiting."""
        return all(one.done() for one in self._writing)

    def end(self) -> list[tuple[ShardFile, DimensionSums]]:
        """Wait until the shards are written, and return them with the sums of their rows; call this only once.

        Raise `UserError` if any shard cannot be written; the other shards must not be used either.
        """
        wait(self._writing)
        self._free()
        return [one.result() for one in self._writing]


class ShardBuffer:
    """Collects rows until there are enough for one shard per hook, then shuffles and writes the rows."""

    def __init__(self, folders: Sequence[Path], shard_rows: int, seed: int, rank: int | None = None) -> None:
        self._folders, self.shard_rows, self._seed, self._rank = folders, shard_rows, seed, rank
        # The means [d_in] that were subtracted from the rows of each hook, if the rows are encoded as int8.
        self.means: list[Tensor] = []
        self._waiting: deque[Block] = deque()
        # Memory from blocks that have been written, to be reused by new blocks.
        self._free: list[list[Raw]] = []
        self.n_waiting = 0
        # Use two pools: in a shared pool, waiting writers could occupy all threads and block the workers' tasks.
        self._writers = ThreadPoolExecutor(min(len(folders), _MOST_THREADS), "shard-writer")
        self._workers = ThreadPoolExecutor(min(_MOST_THREADS, 1 + len(os.sched_getaffinity(0))), "shard-worker")

    def add(self, rows: list[Tensor], origin: StoredOrigin, chosen: Tensor | None = None) -> None:
        """Add the rows [n, d_in] of the same tokens at each hook; the caller must not modify the tensors afterwards.

        If `chosen` [n] is given, add only the rows at these indices. `origin` has one entry per added row.
        """
        done, n = 0, len(origin.token_ids)
        raws = [_raw(one) for one in rows] if n else []
        while done < n:
            block = self._block(rows)
            last = min(n, done + block.n_free)
            for raw, memory in zip(raws, block.memory, strict=True):
                at = slice(done, last) if chosen is None else chosen[done:last].numpy()
                block.coming.append(self._workers.submit(_copy, raw, at, memory[block.n : block.n + last - done]))
            block.origins.append(StoredOrigin(*(one[done:last] for one in origin)))
            block.n += last - done
            done = last
        self.n_waiting += n

    @property
    def is_full(self) -> bool:
        return self.n_waiting >= self.shard_rows

    def row_bytes(self, rows: list[Tensor]) -> int:
        """Return the total size on disk of one row from every hook, in bytes."""
        return sum(of_hook.shape[1] * of_hook.element_size() + _BYTES_BESIDE for of_hook in rows)

    def write(self, number: int) -> list[tuple[ShardFile, DimensionSums]]:
        """Write the next shard of each hook, and return the shards with the sums of their rows.

        Raise `UserError` if any shard cannot be written; the other shards with this number must not be used either.
        """
        return self.begin_write(number).end()

    def begin_write(self, number: int) -> ShardsBegun:
        """Start writing the next shard of each hook; calling `end` on the result releases the memory for reuse."""
        block = self._waiting.popleft()
        self.n_waiting -= block.n
        name = f"shard-{number:05d}" if self._rank is None else f"shard-{number:05d}-{self._rank:03d}"
        order = order_of_shard(self._seed, name, block.n)
        origin = StoredOrigin(*(one[order] for one in block.origin()))
        files = [folder / f"{name}.safetensors" for folder in self._folders]
        writing = [
            self._writers.submit(self._write, file, block, hook, order, origin) for hook, file in enumerate(files)
        ]
        return ShardsBegun(writing, lambda: self._free.append(block.memory))

    def close(self) -> None:
        """Wait for all copies and writes in progress, and stop the threads."""
        self._writers.shutdown()
        self._workers.shutdown()

    def _block(self, rows: list[Tensor]) -> Block:
        """Return the block for the next row; create a new block if the last one is full."""
        if not self._waiting or not self._waiting[-1].n_free:
            widths = [of_hook.shape[1] * of_hook.element_size() for of_hook in rows]
            memory = self._free.pop() if self._free else [np.empty((self.shard_rows, one), np.uint8) for one in widths]
            self._waiting.append(Block(memory, [of_hook.dtype for of_hook in rows]))
        return self._waiting[-1]

    def _write(
        self, file: Path, block: Block, hook: int, order: Tensor, origin: StoredOrigin
    ) -> tuple[ShardFile, DimensionSums]:
        for one in block.coming:
            one.result()
        dtype, raw = block.dtypes[hook], block.memory[hook]
        mean = self.means[hook] if self.means else None
        width = raw.shape[1] // dtype.itemsize
        pieces, sums = _pieces(raw, order.numpy()), RunningSums(dtype, width if mean is None else len(mean), mean)
        like = {TENSOR if mean is None else INT8_ROWS: torch.empty(1, width, dtype=dtype), **origin._asdict()}
        if mean is not None:
            like[INT8_MEAN] = mean
        return _write(file, like, pieces, sums, self._workers), sums.sums(block.n)


def _raw(rows: Tensor) -> Raw:
    raw: Raw = rows.cpu().contiguous().view(torch.uint8).numpy()
    return raw


def _copy(raw: Raw, at: Any, memory: Raw) -> None:
    """Copy the rows at `at`, a slice or indices, to `memory`."""
    if isinstance(at, slice):
        np.copyto(memory, raw[at])
    else:
        np.take(raw, at, axis=0, out=memory, mode="clip")


def _pieces(raw: Raw, order: NDArray[np.int64]) -> Iterator[Raw]:
    """Yield the rows in the given order, in pieces; each piece overwrites the memory of the previous one."""
    n = max(1, _PIECE_BYTES // raw.shape[1])
    memory = np.empty((min(n, len(order)), raw.shape[1]), np.uint8)
    for first in range(0, len(order), n):
        numbers = order[first : first + n]
        # With the default mode, "raise", NumPy would make a second copy.
        yield np.take(raw, numbers, axis=0, out=memory[: len(numbers)], mode="clip")


def order_of_shard(seed: int, name: str, n: int) -> Tensor:
    """Return the order [n] in which a shard stores its rows: stored row i is row `order[i]` in text order.

    The order depends on the seed and the shard's name, which contains the shard number and, if there are several
    processes, the process number.
    """
    numbers = [int(one) for one in re.findall("[0-9]+", name)]
    return torch.from_numpy(np.random.default_rng([seed, *numbers]).permutation(n))


def _write(
    file: Path, like: dict[str, Tensor], pieces: Iterator[Raw], sums: RunningSums, workers: ThreadPoolExecutor
) -> ShardFile:
    """Write a safetensors file atomically and sync it to disk; return its name, row count and SHA-256.

    The file contains the tensors of `like`, except that the rows come from `pieces`.
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
                if name not in (TENSOR, INT8_ROWS):
                    _write_all(stream, like[name].numpy(), digest)
                    continue
                for piece in pieces:
                    beside = [workers.submit(digest.update, piece.data), workers.submit(sums.add, piece)]
                    _write_all(stream, piece)
                    for one in beside:
                        one.result()
            os.fsync(stream.fileno())
            n_bytes = stream.tell()
        temporary.chmod(file_mode(file.parent))
        os.replace(temporary, file)
        sync(file.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise not_written(file, error.strerror or str(error), error.errno) from None
    return ShardFile(file.name, n, digest.hexdigest(), n_bytes)


def _header(like: dict[str, Tensor], n: int) -> tuple[list[str], bytes]:
    """Return the names of the tensors in file order, and the header of a file with `n` rows of each tensor.

    The names and the header are derived from the file that safetensors writes for one row. Only the mean of int8 rows
    is not repeated for every row.
    """
    small = save({name: one if name == INT8_MEAN else one[:1].contiguous() for name, one in like.items()})
    table = json.loads(small[8 : 8 + int.from_bytes(small[:8], "little")])
    end = 0
    for name, facts in table.items():
        first, last = facts["data_offsets"]
        if name != INT8_MEAN:
            facts["shape"][0] = n
        facts["data_offsets"] = [end, end := end + (1 if name == INT8_MEAN else n) * (last - first)]
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [*table], len(text).to_bytes(8, "little") + text


def _write_all(stream: Any, values: Any, digest: Any = None) -> None:
    """Write all bytes, calling `write` again after a partial write, and hash the bytes if a digest is given."""
    left = memoryview(values).cast("B")
    if digest:
        digest.update(left)
    while left:
        left = left[stream.write(left) :]


class RunningSums:
    """Float64 sums over rows that arrive in pieces; `mean` was subtracted from rows encoded as int8."""

    def __init__(self, dtype: torch.dtype, width: int, mean: Tensor | None = None) -> None:
        self._dtype, self._mean, self._noise = dtype, mean, 0.0
        self.total, self._squares = np.zeros(width), np.zeros(width)
        self._exact = np.empty((_ROWS_AT_ONCE, width))

    def add(self, raw: Raw) -> None:
        """Add rows, given as bytes."""
        rows = torch.from_numpy(raw).view(self._dtype)
        for part in rows.split(_ROWS_AT_ONCE):
            exact = self._exact[: len(part)]
            at_once = max(1, _NUMBERS_ALONE // part.shape[1])
            for some, to in zip(part.split(at_once), torch.from_numpy(exact).split(at_once), strict=True):
                to.copy_(some if self._mean is None else decoded(some, self._mean))
            if self._mean is not None:
                self._noise += noise_of(part, len(self._mean))
            self.total += exact.sum(0)
            self._squares += np.einsum("ij,ij->j", exact, exact)

    def sums(self, n: int) -> DimensionSums:
        """Return the sums over all `n` rows."""
        return DimensionSums(n, self.total.tolist(), self._squares.tolist(), self._noise)


def add_sums(first: DimensionSums | None, second: DimensionSums) -> DimensionSums:
    """Return the sums over the rows in both arguments."""
    if first is None:
        return second
    pairs = zip((first.total, first.squares), (second.total, second.squares), strict=True)
    total, squares = ([a + b for a, b in zip(*pair, strict=True)] for pair in pairs)
    return DimensionSums(first.n + second.n, total, squares, first.noise + second.noise)

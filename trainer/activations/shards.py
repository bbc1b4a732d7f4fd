"""Reads activations from memory-mapped shards; only the rows of a batch are read."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import resource
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer.activations.base import Empty, IndexedSource, Indices, Pair, Span, empty_rows
from trainer.activations.int8_rows import MOST_MEANS, Int8Code, decoded
from trainer.activations.side_by_side import Joined, SideBySide, matched
from trainer.activations.texts import Texts
from trainer.contract.errors import JobFileError, Problem, UserError, first_line
from trainer.contract.json_file import read_json
from trainer.contract.machine_memory import machine_memory
from trainer.contract.object_cache import RowCache, cache_limit, copy_of, keep_columns
from trainer.contract.object_paths import url_of
from trainer.contract.runs.data_record import DataRecord, cut_sentence
from trainer.contract.settings.rows import INT8, row_bytes
from trainer.contract.settings.shards import PLACE, TOKENS, Shard, ShardSet, numbers_in
from trainer.contract.settings.sources import Paths, ShardSettings, each, inspect_sets
from trainer.contract.wording import gibibytes, join_words, plural

Bytes = NDArray[np.uint8]
# The numpy and torch dtypes for each stored dtype. Two-byte values are read as integers and reinterpreted by torch,
# because numpy has no bfloat16.
DTYPES = {
    "F16": (np.int16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),
    "F32": (np.float32, torch.float32),
    "F64": (np.float64, torch.float64),
    INT8: (np.uint8, torch.uint8),
}

_NO_TEXT = -(2**63)
# A meta.json key written only by sae-tui's own extraction.
_OF_EXTRACTION = "documents_share_contexts"
# The number of neighbouring rows to read together from shuffled shards. A disk reads such runs as fast as sequential
# data, and a batch of 4096 rows still comes from 64 runs.
_RUN = 64
# The number of Parquet rows decoded at a time; they take 40 MB at d_in = 2304.
_ROWS_AT_ONCE = 4096


class ShardCutError(UserError):
    """Raised when a shard is truncated while it is being read, or can no longer be downloaded."""


class Shards(IndexedSource):
    """The shards in one or more folders, as a single array [n_tokens, d_in]; other folders can provide the targets.

    The constructor raises a `JobFileError` that names data.path, data.target_path or data.weights.
    """

    def __init__(
        self,
        *,
        path: Paths,
        target_path: Paths | None = None,
        weights: list[float] | None = None,
        hook: str | None = None,
        join: bool = False,
        shuffle_shards: int | None = None,
        cache_gb: float | None = None,
    ) -> None:
        settings = ShardSettings(path, target_path, weights, hook, join)
        self.d_in, self.d_out = settings.shape()[:2]
        sets = inspect_sets(settings.folders, "data.path")
        self.sizes, self.weights = [one.n_tokens for one in sets], weights
        self.n_tokens = sum(self.sizes)
        targets = settings.targets
        self.place = (
            settings.place if targets is None else f"{settings.place} with targets in {join_words(each(targets))}"
        )
        self.meta = _meta_of(sets)
        self.notes = [note for one in sets for note in one.notes]
        if self.meta.get("shuffled") is True:
            self.run = _RUN
        self._sets, self._target_sets, self._target_field = sets, None, settings.target_field
        if targets is not None:
            self._target_sets = inspect_sets(targets, settings.target_field)
            meta = _meta_of(self._target_sets)
            of_targets = {"hook_name": "hook_name_out", "output_module": "output_module_out", "mean": "mean_out"}
            self.meta |= {ours: meta.get(theirs) for theirs, ours in of_targets.items()}
        self._cache_gb = cache_gb
        _allow_open_files()
        self._map(self._sets, self._target_sets)

    def _map(self, sets: list[ShardSet], targets: list[ShardSet] | None) -> None:
        try:
            self._map_all(sets, targets)
        except OSError as error:
            n_files = sum(len(one.shards) for one in sets)
            cure = "raise the limit on open files (`ulimit -n 65536`)" if error.errno == errno.EMFILE else "check them"
            message = f"the {plural(n_files, 'shard')} of {self.place} cannot be opened: {error.strerror}; {cure}"
            raise JobFileError([Problem("data.path", message)]) from None

    def _map_all(self, sets: list[ShardSet], targets: list[ShardSet] | None) -> None:
        cache = self._cache([shard.file for one in (*sets, *(targets or ())) for shard in one.shards])
        self.texts, alone = _texts_of(sets, self.split_sizes), self.run == 1
        self.usual_hold_out = "texts" if self.texts else "rows" if self.run > 1 else "blocks"
        self._inputs = _Mapped(sets, "data.path", alone=alone, cache=cache)
        self._targets = None if targets is None else _Mapped(targets, self._target_field, alone=alone, cache=cache)
        self.shard_starts = self._inputs.starts if len(sets) == 1 else ()

    def _cache(self, files: list[Path]) -> RowCache | None:
        """Return the cache that downloads shards from URLs, or None if all shards are local files."""
        for old in self.caches:
            old.close()
        files = [file for file in files if url_of(file)]
        if not files:
            return None
        keep_columns(files, "data.path")
        cache = RowCache(files, "data.path", cache_limit(self._cache_gb))
        self.caches = [cache]
        return cache

    def use_window(self, shuffle_shards: int, split_rows: int) -> None:
        self.shuffle_shards, self.split_sizes = shuffle_shards, [split_rows]

    def keep(self, spans: Sequence[Span]) -> None:
        for cache in self.caches:
            mapped = [self._inputs] if self._targets is None else [self._inputs, self._targets]
            cache.want(list(dict.fromkeys(file for span in spans for one in mapped for file in one.files_of(span))))

    def continue_from(self, before: DataRecord) -> None:
        n = len(self._sets)
        self.split_sizes = [folder.split_rows for folder in before[:n]]
        self.shuffle_shards = before[0].shuffle_shards
        targets = None if self._target_sets is None else _in_order(self._target_sets, before[n:])
        self._sets = _in_order(self._sets, before[:n])
        self._map(self._sets, targets)

    def beside(self, others: Sequence[Shards]) -> SideBySide:
        return SideBySide([self, *others])

    def joined(self, others: Sequence[Shards]) -> Joined:
        # All layers of a cross-layer transcoder come from one extraction, which has the same rows at every hook.
        return Joined([self, *others] if self.d_out is not None else matched([self, *others]))

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

    @property
    def stored_as(self) -> str:
        if self._inputs.coded_bytes is None:
            return ""
        noise = self.meta.get("int8_noise")
        return f"int8, noise {noise:.1e} of their variance" if isinstance(noise, float) else "int8"

    @property
    def coded_bytes(self) -> tuple[int, int] | None:
        x, y = self._inputs.coded_bytes, 0 if self._targets is None else self._targets.coded_bytes
        return None if x is None or y is None else (x, y)

    def coded_pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        if self.coded_bytes is None:
            return self.pairs(indices, empty)
        indices = _sorted(indices)
        x = self._inputs.coded(indices, empty)
        return x, x if self._targets is None else self._targets.coded(indices, empty)

    def decoded(self, pair: Pair) -> Pair:
        if self.coded_bytes is None:
            return pair
        x, y = pair
        inputs = self._inputs.decoded(x)
        return inputs, inputs if self._targets is None else self._targets.decoded(y)

    def token_ids(self, indices: Indices) -> Indices | None:
        if (parts := self._numbers(TOKENS)) is None:
            return None
        starts = np.cumsum([0, *map(len, parts)])
        own = zip(parts, starts, itertools.pairwise(np.searchsorted(indices, starts)), strict=False)
        return np.concatenate([part[indices[first:last] - start] for part, start, (first, last) in own]).astype(
            np.int64
        )

    def first_shards(self) -> Sequence[Shard]:
        return self._sets[0].shards

    def places(self) -> list[Indices] | None:
        return self._numbers(PLACE)

    def _numbers(self, name: str) -> list[Indices] | None:
        """Return a memory map of a number per row for each shard, or None if a shard does not store it."""
        shards = [shard for one in self._sets for shard in one.shards]
        found = [numbers_in(shard, name) for shard in shards]
        maps: list[Indices] = [
            np.memmap(shard.file, at.dtype, "r", at.offset, (shard.n_tokens,))
            for shard, at in zip(shards, found, strict=True)
            if at
        ]
        return maps if len(maps) == len(shards) else None

    def name_of(self, index: int) -> str:
        name = self._inputs.name_of(index)
        return name if self._targets is None else f"{name} or its target, {self._targets.name_of(index)}"


class _Mapped:
    """The consecutively numbered rows of several sets of shards; with `alone`, rows are not read in runs."""

    def __init__(self, sets: Sequence[ShardSet], field: str, *, alone: bool, cache: RowCache | None = None) -> None:
        self._cache = cache
        self._shards = [shard for one in sets for shard in one.shards]
        self._inodes = [shard.file.stat().st_ino for shard in self._shards]
        contents = {file: _content(shard, field) for file, shard in {one.file: one for one in self._shards}.items()}
        if alone and sum(map(len, contents.values())) > machine_memory().total_bytes // 2:
            _read_alone(contents.values())
        self._mapped = [_rows_of(shard, contents[shard.file], field) for shard in self._shards]
        self._maps = [_map_of(contents[shard.file]) for shard in self._shards]
        self._field = field
        self._starts = np.cumsum([0] + [shard.n_tokens for shard in self._shards])
        self._are_several = len(sets) > 1
        dtypes = {DTYPES[shard.dtype][1] for shard in self._shards}
        self._dtype = dtypes.pop() if len(dtypes) == 1 and torch.float64 not in dtypes else torch.float32
        self._means = [_mean_of(shard, contents[shard.file]) for shard in self._shards]
        self._code, self._numbers = _code_of(self._means)
        if self._code is None and self._dtype == torch.uint8:
            self._dtype = torch.float32
        # The rows in `_mapped` as tensors, for reading with all threads.
        self._tensors: list[Tensor] = []

    @property
    def starts(self) -> list[int]:
        """The first row of each shard."""
        return [int(start) for start in self._starts[:-1]]

    def files_of(self, span: Span) -> list[Path]:
        """Return the files with the rows of a span."""
        first, last = np.searchsorted(self._starts, span[0], "right") - 1, np.searchsorted(self._starts, span[1])
        return [shard.file for shard in self._shards[int(first) : int(last)]]

    def read_by_all_threads(self) -> None:
        with warnings.catch_warnings():
            # The rows are never written to, so the warning does not apply.
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            self._tensors = [torch.from_numpy(rows) for rows in self._mapped]

    def rows(self, indices: Indices, empty: Empty = empty_rows) -> Tensor:
        """Read rows [n, d] in ascending index order, because reading in file order is several times faster."""
        return self.decoded(self.coded(indices, empty))

    @property
    def coded_bytes(self) -> int | None:
        """The bytes of a row from `coded`, or None if it is not encoded."""
        return None if self._code is None else self._code.row_bytes

    def decoded(self, rows: Tensor) -> Tensor:
        """Decode rows from `coded`, on the same device."""
        return rows if self._code is None else self._code.decode(rows)

    def coded(self, indices: Indices, empty: Empty = empty_rows) -> Tensor:
        """Read rows as `rows` does, but without decoding int8 rows if all shards contain such rows."""
        width = self._shards[0].d_in if self._code is None else self._code.row_bytes
        rows = empty(len(indices), width, self._dtype)
        for number, (first, last) in enumerate(itertools.pairwise(np.searchsorted(indices, self._starts))):
            if last > first:
                with self._kept(number):
                    self._read(number, indices[first:last], rows[first:last])
        return rows

    @contextlib.contextmanager
    def _kept(self, number: int) -> Iterator[None]:
        """Wait until a shard from a URL is downloaded, and keep it while it is read."""
        with contextlib.ExitStack() as stack:
            if self._cache:
                try:
                    stack.enter_context(self._cache.reading(self._shards[number].file))
                except UserError as error:
                    raise ShardCutError(str(error)) from None
                self._map_again(number)
            yield

    def _map_again(self, number: int) -> None:
        """Map a shard's copy again if it is another file than before, because another process removed that one."""
        shard = self._shards[number]
        with contextlib.suppress(FileNotFoundError):
            inode = shard.file.stat().st_ino
            if inode == self._inodes[number] or (copy := copy_of(shard.file)) is None or copy.holds != "rows":
                return
            content = _content(shard, self._field)
            self._mapped[number], self._maps[number] = _rows_of(shard, content, self._field), _map_of(content)
            self._inodes[number] = inode
            if self._tensors:
                self.read_by_all_threads()

    def name_of(self, index: int) -> str:
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard = self._shards[number]
        name = f"{shard.file.parent.name}/{shard.file.name}" if self._are_several else shard.file.name
        return f"row {shard.first_row + index - self._starts[number]} of {name}"

    def _read(self, number: int, indices: Indices, into: Tensor) -> None:
        """Read rows of a shard into `into`, a slice of the batch.

        Only the calling thread reads, unless `read_by_all_threads` was called. Raise `ShardCutError` if the file was
        truncated, because reading past its end would kill the process with SIGBUS.
        """
        mapped = self._maps[number]
        if mapped is not None and (size := mapped.size()) < len(mapped):
            file = self._shards[number].file
            raise ShardCutError(f"{self._field}: {cut_sentence(file, size, len(mapped))}")
        rows, places = self._mapped[number], indices - self._starts[number]
        dtype, mean = DTYPES[self._shards[number].dtype][1], self._means[number]
        if self._code is None and mean is not None:
            into.copy_(decoded(torch.from_numpy(rows[places]), mean))
            return
        if self._code is not None and self._code.has_index:
            into[:, -1] = self._numbers[number]
            into = into[:, :-1]
        if self._tensors and dtype == into.dtype:
            whole = self._tensors[number]
            torch.index_select(whole, 0, torch.from_numpy(places), out=into.view(whole.dtype))
        elif dtype == into.dtype:
            np.take(rows, places, axis=0, out=into.view(torch.uint8).numpy().view(rows.dtype), mode="clip")
        else:
            into.copy_(torch.from_numpy(rows[places]).view(dtype))


def _allow_open_files() -> None:
    """Raise this process's limit on open files as far as possible, because a shard may need three of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _in_order(sets: list[ShardSet], before: DataRecord) -> list[ShardSet]:
    """Return the shards in each folder; shards the run was trained on come first, in their original order."""
    return [one.beginning_with(folder.names) for one, folder in zip(sets, before, strict=True)]


def _sorted(indices: Indices) -> Indices:
    # A stable sort exploits ascending runs. It takes a tenth as long as the default sort, which took a seventh of the
    # reading time.
    return np.sort(indices, kind="stable")


def _content(shard: Shard, field: str) -> Bytes:
    return np.memmap(shard.file, np.uint8, "r") if shard.column is None else _decode(shard, field)


def _map_of(content: Bytes) -> mmap.mmap | None:
    """Return the memory map of a file's content, or None if the file is not memory-mapped."""
    return content.base if isinstance(content.base, mmap.mmap) else None


def _read_alone(contents: Iterable[Bytes]) -> None:
    """Turn off the kernel's read-ahead, which would read 128 KiB for a 4 KiB row and fill the page cache."""
    for content in contents:
        if mapped := _map_of(content):
            mapped.madvise(mmap.MADV_RANDOM)


def _rows_of(shard: Shard, content: Bytes, field: str) -> NDArray[Any]:
    """Return a view of the rows in a shard file; raise `JobFileError` if lists differ in length."""
    if shard.lists is not None:
        begin, size = shard.lists
        ends = content[begin : begin + size * (shard.n_tokens + 1)].view(f"<i{size}")
        if ends[0] != 0 or (np.diff(ends) != shard.d_in).any():
            raise JobFileError(
                [Problem(field, f"{shard.file} contains lists of different lengths; keep only lists of one length")]
            )
    dtype = np.dtype(DTYPES[shard.dtype][0])
    width = row_bytes(shard.d_in, shard.dtype) // dtype.itemsize
    return content[shard.offset : shard.offset + shard.n_bytes].view(dtype).reshape(shard.n_tokens, width)


def _mean_of(shard: Shard, content: Bytes) -> Tensor | None:
    """Return the mean that was subtracted from a shard's int8 rows, or None for rows of other types."""
    if shard.mean is None:
        return None
    return torch.from_numpy(content[shard.mean : shard.mean + 4 * shard.d_in].view(np.float32).copy())


def _code_of(means: Sequence[Tensor | None]) -> tuple[Int8Code | None, list[int]]:
    """Return a code for all shards, and the index of each shard's mean; None if some of the rows are not int8 rows."""
    of_shards = [mean for mean in means if mean is not None]
    keys = {mean.numpy().tobytes(): mean for mean in of_shards}
    if len(of_shards) < len(means) or len(keys) > MOST_MEANS:
        return None, []
    places = {key: place for place, key in enumerate(keys)}
    return Int8Code([*keys.values()]), [places[mean.numpy().tobytes()] for mean in of_shards]


def _texts_of(sets: Sequence[ShardSet], split_sizes: Sequence[int]) -> list[Texts]:
    """Return each set's texts, or [] if a shard from which rows can be held out does not record its texts.

    Rows of later shards without recorded texts do not belong to any held-out text.
    """
    texts = []
    for one, n_split in zip(sets, split_sizes or [one.n_tokens for one in sets], strict=True):
        parts, first = list[NDArray[Any]](), 0
        for shard in one.shards:
            at = numbers_in(shard)
            if at is None and first < n_split:
                return []
            parts.append(
                np.memmap(shard.file, at.dtype, "r", at.offset, (shard.n_tokens,))
                if at
                else np.broadcast_to(np.array(_NO_TEXT), shard.n_tokens)
            )
            first += shard.n_tokens
        meta = _read_meta(one.shards[0].file.parent / "meta.json")
        # An extraction numbers all its texts in one sequence, even if several processes write shards.
        texts.append(Texts(parts, numbered_through=_OF_EXTRACTION in meta))
    return texts


def _read_meta(file: Path) -> dict[str, Any]:
    """Return the metadata written next to the shards by the extraction, or {} if it is missing."""
    return read_json(file, dict[str, Any]) or {}


def _meta_of(sets: Sequence[ShardSet]) -> dict[str, Any]:
    """Return the metadata common to all sets of shards."""
    metas = [_read_meta(one.shards[0].file.parent / "meta.json") for one in sets]
    return {key: value for key, value in metas[0].items() if all(meta.get(key) == value for meta in metas)}


def _decode(shard: Shard, field: str) -> NDArray[np.uint8]:
    """Decode a Parquet file into a temporary file, and return the bytes of its rows as a memory map.

    Parquet compresses rows in pages, so reading a batch of random rows would require decoding the entire file. Each
    rank has its own unnamed temporary file in `TMPDIR`, which is deleted when the process exits. Raise a `JobFileError`
    that names `field` if decoding fails.
    """
    size, folder = shard.n_bytes, Path(tempfile.gettempdir())
    if (free := shutil.disk_usage(folder).free) < size:
        need = f"takes {gibibytes(size)} once decoded, but {folder} has only {gibibytes(free)} left"
        raise _problem(
            field, shard, f"{need}; set TMPDIR to a folder with more space, or store the rows as safetensors"
        )
    with tempfile.TemporaryFile() as file:
        try:
            _write_decoded(shard, file, field)
        except OSError as error:
            raise _problem(field, shard, f"cannot be decoded to {folder}: {first_line(error)}") from None
        file.flush()
        return np.memmap(file, np.uint8, "r", shape=(size,))


def _write_decoded(shard: Shard, file: IO[bytes], field: str) -> None:
    n_rows = 0
    for rows in _decoded_batches(shard, field):
        file.write(np.ascontiguousarray(rows).data)
        n_rows += len(rows)
    if n_rows != shard.n_tokens:
        raise _problem(field, shard, f"has {n_rows:,} rows, not the {shard.n_tokens:,} in its header; copy it again")


def _decoded_batches(shard: Shard, field: str) -> Iterator[NDArray[Any]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(shard.file) as parquet:
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=[shard.column]):
                lists = batch.column(0)
                numbers = lists.flatten()
                lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
                if lists.null_count or numbers.null_count or (lengths != shard.d_in).any():
                    raise _problem(field, shard, "contains lists of different lengths, or missing values")
                yield numbers.to_numpy().reshape(len(lists), shard.d_in)
    except pyarrow.ArrowException as error:
        raise _problem(field, shard, f"cannot be decoded: {first_line(error)}") from None


def _problem(field: str, shard: Shard, message: str) -> JobFileError:
    return JobFileError([Problem(field, f"{shard.file} {message}")])

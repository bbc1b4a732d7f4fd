"""Determines the contents of an activation folder from its file headers alone, without torch or numpy.

This module reads the headers of safetensors and .npy files. Other formats need torch or pyarrow, so the trainer reads
their headers, and the app requests the result from the trainer.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trainer.contract.errors import JobFileError, Problem, UserError
from trainer.contract.extras import install, is_installed
from trainer.contract.files import open_plain
from trainer.contract.json_file import convert_as, read_json
from trainer.contract.object_paths import local_path, url_of
from trainer.contract.settings.inspectors import inspector
from trainer.contract.settings.npy import read_npy
from trainer.contract.settings.rows import (
    DTYPE_BYTES,
    INT8,
    VECTORS,
    NotRowsError,
    RowRange,
    choose_tensor,
    row_bytes,
    rows_and_width,
)
from trainer.contract.wording import join_words, plural

TENSOR = "activations"
# The names of the tensors that contain rows encoded as int8, and the mean that was subtracted from them.
INT8_ROWS, INT8_MEAN = "int8_rows", "int8_mean"
# The name of the tensor that contains each row's text number.
DOCUMENT = "document"
# The name of the tensor with the token of each row.
TOKENS = "token_ids"
# The name of the tensor with the place of each row's token in the text, which identifies the row in other extractions.
PLACE = "place"
NUMBERS = {"I8": "i1", "U8": "u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8"}
_LARGEST_HEADER = 100_000_000  # the format's own limit
# File types of shards; the first type present in a folder is read.
_KINDS = ((".safetensors",), (".npy",), (".pt", ".pth"), (".arrow",), (".parquet",))
_KINDS_IN_WORDS = ".safetensors, .npy, .pt, .arrow or .parquet"
# File types that only an `Inspector` reads, each with the name of its format if that format needs pyarrow.
_OF_INSPECTOR = {".pt": "", ".pth": "", ".arrow": "Arrow", ".parquet": "Parquet"}
# The prefix of files that `datasets` writes next to the rows, for example to record the row order after a shuffle.
_CACHE = "cache-"
# The maximum number of names in a message.
_MOST_NAMES = 8


class Shard(RowRange, frozen=True, kw_only=True):
    """The rows in a file, or a range of its rows starting at row `first_row`."""

    file: Path
    first_row: int = 0


_Count = Annotated[int, msgspec.Meta(ge=0)]


class HeaderTensor(msgspec.Struct):
    """The entry for a tensor in a header; offsets are relative to the end of the header."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


class _NumberColumn(msgspec.Struct):
    """The header entry for a tensor with one number per row."""

    dtype: str
    shape: tuple[_Count]
    data_offsets: tuple[_Count, _Count]


class ShardSet(msgspec.Struct, frozen=True):
    """All shards at a data path, sorted by name."""

    shards: tuple[Shard, ...]
    # Notes for the user about reading the shards, such as skipped files and converted values.
    notes: tuple[str, ...] = ()

    @property
    def d_in(self) -> int:
        return self.shards[0].d_in

    @property
    def n_tokens(self) -> int:
        return sum(shard.n_tokens for shard in self.shards)

    def beginning_with(self, names: Sequence[str]) -> ShardSet:
        """Return the same shards, starting with the shards in `names`, in that order."""
        places = {name: place for place, name in enumerate(names)}
        shards = sorted(self.shards, key=lambda shard: places.get(shard.file.name, len(places)))
        return ShardSet(tuple(shards), self.notes)


class RowNumbers(msgspec.Struct, frozen=True):
    """The byte offset of a shard's tensor with a number per row, such as its text, and the numbers' numpy type."""

    offset: int
    dtype: str


def numbers_in(shard: Shard, name: str = DOCUMENT) -> RowNumbers | None:
    """Return the location of a tensor with a number per row, or None if the shard does not store it."""
    if shard.file.suffix != ".safetensors":
        return None
    try:
        header, begin = read_header(shard.file)
        column = convert_as(header[name], _NumberColumn)
    except (KeyError, ValueError, OSError):
        return None
    (n_rows,), (first, last) = column.shape, column.data_offsets
    dtype = NUMBERS.get(column.dtype)
    if dtype is None or n_rows != shard.n_tokens or last - first != n_rows * int(dtype[-1]):
        return None
    return RowNumbers(begin + first, dtype) if begin + last <= shard.file.stat().st_size else None


def same_shards(sets: Sequence[ShardSet]) -> tuple[Path, Path] | None:
    """Return two shards that are the same file or have the same SHA-256 in meta.json, or None if there is no such pair.

    Links are resolved to detect a folder listed twice under different names.
    """
    first: dict[object, Path] = {}
    for one in sets:
        files = list(dict.fromkeys(shard.file for shard in one.shards))
        sums = recorded_sums(files[0].parent)
        for file in files:
            state = file.stat()
            for identity in ((state.st_dev, state.st_ino), sums.get(file.name)):
                if identity and identity in first:
                    return first[identity], file
                first[identity] = file
    return None


def recorded_sums(folder: Path) -> dict[str, str]:
    """Return a dict mapping each shard name to the SHA-256 that the extraction recorded in meta.json.

    The dict is empty if no checksums are recorded.
    """
    shards = (read_json(folder / "meta.json", dict[str, object]) or {}).get("shards")
    return {name: one for name, one in shards.items() if isinstance(one, str)} if isinstance(shards, dict) else {}


def is_shuffled(shards: ShardSet) -> bool:
    """Return whether meta.json records that the rows were shuffled before they were stored."""
    meta = read_json(shards.shards[0].file.parent / "meta.json", dict[str, object]) or {}
    return meta.get("shuffled") is True


def inspect_shards(path: str | Path, field: str = "data.path") -> ShardSet:
    """Read the headers of all shards at a path or URL; raise `JobFileError` for `field` if there is a problem."""
    if url_of(path := local_path(str(path))):
        # Only the trainer makes requests; the app asks a trainer process.
        read = inspector()
        of_objects: ShardSet = read(Path(path), [], field) if read else inspect_objects(Path(path), field)
        return of_objects
    root, files = shards_at(path, field)
    if (kind := files[0].suffix) not in _OF_INSPECTOR:
        return shard_set(root, files, field, functools.partial(_read, field=field))
    if (name := _OF_INSPECTOR[kind]) and not is_installed("pyarrow"):
        raise _problem(field, files[0], f"cannot be read: {name} needs pyarrow: {install('parquet')}")
    if (inspect := inspector()) is None:
        raise _problem(field, root, "is in a format that only the trainer reads; store the rows as safetensors")
    found: ShardSet = inspect(root, files, field)
    return found


def inspect_objects(root: Path, field: str) -> ShardSet:
    """Read the headers of the shards at the URL whose copies a local folder keeps; see `inspect_shards`."""
    from trainer.contract import object_cache  # loads OpenSSL, which takes 2 ms

    try:
        object_cache.refresh(root, field, recorded_sums)
    except JobFileError:
        raise
    except UserError as error:
        raise JobFileError([Problem(field, str(error).removeprefix(f"{field}: "))]) from None
    root, files = shards_at(root, field)
    return shard_set(root, files, field, functools.partial(_read, field=field))


def shards_at(path: str | Path, field: str = "data.path") -> tuple[Path, list[Path]]:
    """Return a data path and its files; raise `JobFileError` for the setting `field` if there are no files."""
    root = Path(os.path.expanduser(path))
    try:
        files = [root] if root.is_file() else shard_files(root)
        exists = root.exists()
    except OSError as error:
        raise _problem(field, root, f"cannot be read: {error.strerror}") from None
    if not exists:
        raise JobFileError([Problem(field, f"there is nothing at {root}; give a folder of {_KINDS_IN_WORDS} shards")])
    if not files:
        raise JobFileError([Problem(field, f"there are no {_KINDS_IN_WORDS} shards in {root}{_instead(root)}")])
    return root, files


Read = Callable[[Path], list[RowRange]]


def shard_set(root: Path, files: Sequence[Path], field: str, read: Read) -> ShardSet:
    """Return the shards at a data path, given a function `read` that returns the ranges of rows in a file.

    `read` may raise `OSError` or `NotRowsError`. Raise `JobFileError` for the setting `field` if a file cannot be used.
    """
    of_files = {file: _inspect(file, field, read) for file in files}
    shards = tuple(itertools.chain.from_iterable(of_files.values()))
    if not shards:
        raise _problem(field, root if files[1:] else files[0], "contains no activations; extract them again")
    for shard in shards:
        if shard.d_in != shards[0].d_in:
            message = f"{shard.file.name} has d_in {shard.d_in}, but {shards[0].file.name} has {shards[0].d_in}"
            raise JobFileError([Problem(field, f"{message}; all shards must agree")])
    return ShardSet(shards, tuple(_notes(root, of_files)))


def shard_files(folder: Path) -> list[Path]:
    """Return the shards in a folder, sorted by name: all visible files of the first file type present."""
    of_kinds = (
        [file for suffix in kind for file in folder.glob(f"*{suffix}") if not _is_hidden(file)] for kind in _KINDS
    )
    files = sorted(next(filter(None, of_kinds), []))
    return [file for file in files if not (file.suffix == ".arrow" and file.name.startswith(_CACHE))]


def _is_hidden(file: Path) -> bool:
    """Return whether a file is hidden; on foreign file systems, macOS writes hidden files next to other files."""
    return file.name.startswith(".")


def _notes(root: Path, of_files: Mapping[Path, list[Shard]]) -> Iterator[str]:
    hidden = [file.name for file in root.glob(".*") if file.is_file()] if root.is_dir() else []
    empty = [file.name for file, shards in of_files.items() if not shards]
    for names, reason in ((hidden, "hidden"), (empty, "without a row")):
        if names:
            more = [f"{len(names) - _MOST_NAMES} more"] if names[_MOST_NAMES:] else []
            listed = join_words([*map(ascii, sorted(names)[:_MOST_NAMES]), *more])
            yield f"skipped {plural(len(names), 'file')} in {root} ({reason}): {listed}"
    columns = sorted({shard.column for shards in of_files.values() for shard in shards if shard.column in VECTORS})
    if columns:
        yield f"{root}: the rows are in the column {join_words([ascii(one) for one in columns])}"
    if any(shard.dtype == "F64" for shards in of_files.values() for shard in shards):
        yield f"{root} stores float64, which is read as float32"


def _instead(root: Path) -> str:
    """Return advice for a folder without shards: save the arrays in an .npz file as .npy, or specify a subfolder."""
    with contextlib.suppress(OSError):
        if any(root.glob("*.npz")):
            return "; a .npz file is an archive of arrays; save its rows as .npy, one array per file"
    return _folders_with(root)


def _folders_with(root: Path) -> str:
    """Return advice naming the subfolders with shards, such as the hooks in an extraction, or ""."""
    with contextlib.suppress(OSError):
        folders = sorted(folder.name for folder in root.iterdir() if folder.is_dir() and shard_files(folder))
        names = [*folders[:_MOST_NAMES], *([f"{len(folders) - _MOST_NAMES} more"] if folders[_MOST_NAMES:] else [])]
        return f"; give one of its subfolders: {join_words(names)}" if folders else ""
    return ""


def _inspect(file: Path, field: str, read: Read) -> list[Shard]:
    try:
        size = file.stat().st_size
        ranges = [] if file.is_file() and not size else read(file)
    except OSError as error:
        raise _problem(field, file, f"cannot be read: {error.strerror}") from None
    except NotRowsError as error:
        raise _problem(field, file, f"is not an array of rows [n_tokens, d_in]: {error}") from None
    begins = itertools.accumulate((rows.n_tokens for rows in ranges), initial=0)
    shards = [
        Shard(file=file, first_row=first, **msgspec.structs.asdict(rows))
        for rows, first in zip(ranges, begins, strict=False)
    ]
    if wrong := next((shard.dtype for shard in shards if shard.dtype not in DTYPE_BYTES), None):
        kinds = "activations must be float16, bfloat16, float32 or float64"
        raise _problem(field, file, f"stores {wrong}; {kinds}; save them as float32")
    if not any(shard.n_tokens * shard.d_in for shard in shards):
        return []
    ends = (max(shard.offset + shard.n_bytes, (shard.mean or 0) + 4 * shard.d_in) for shard in shards)
    if size < max(ends) and shards[0].column is None:
        raise _problem(field, file, "is truncated; copy it again")
    return shards


def _read(file: Path, field: str) -> list[RowRange]:
    return [read_npy(file) if file.suffix == ".npy" else _read_safetensors(file, field)]


def _read_safetensors(file: Path, field: str) -> RowRange:
    try:
        header, begin = read_header(file)
        tensors = {name: convert_as(one, HeaderTensor) for name, one in header.items() if name != "__metadata__"}
    except ValueError:
        raise _problem(field, file, "is not a complete safetensors file; copy it again") from None
    if INT8_ROWS in tensors:
        return _int8_rows(tensors, begin)
    tensor = tensors[choose_tensor(TENSOR, {name: (one.dtype, one.shape) for name, one in tensors.items()})]
    (n_tokens, d_in), dtype, (start, end) = rows_and_width(tensor.shape), tensor.dtype, tensor.data_offsets
    if dtype in DTYPE_BYTES and end - start != n_tokens * d_in * DTYPE_BYTES[dtype]:
        raise _problem(field, file, "is truncated; copy it again")
    return RowRange(begin + start, n_tokens, d_in, dtype)


def _int8_rows(tensors: Mapping[str, HeaderTensor], begin: int) -> RowRange:
    rows, mean = tensors[INT8_ROWS], tensors.get(INT8_MEAN)
    if mean is None or mean.dtype != "F32" or len(mean.shape) != 1:
        raise NotRowsError(f"its tensor {INT8_ROWS!a} needs {INT8_MEAN!a}, a float32 vector; extract the rows again")
    (d_in,), (start, end), (first, last) = mean.shape, rows.data_offsets, mean.data_offsets
    width = row_bytes(d_in, INT8)
    n_tokens = rows.shape[0] if rows.shape else 0
    if (
        rows.dtype != "U8"
        or rows.shape != (n_tokens, width)
        or (end - start, last - first)
        != (
            n_tokens * width,
            4 * d_in,
        )
    ):
        message = f"its tensor {INT8_ROWS!a} is not uint8 of shape [n_tokens, {width}], as {INT8_MEAN!a} says"
        raise NotRowsError(f"{message}; extract the rows again")
    return RowRange(begin + start, n_tokens, d_in, INT8, mean=begin + first)


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file and the offset of its data; raise `OSError` or `ValueError`."""
    with open_plain(file) as stream:
        (length,) = struct.unpack("<Q", stream.read(8).ljust(8, b"\xff"))
        if length > _LARGEST_HEADER:
            raise ValueError("not a safetensors header")
        try:
            header = json.loads(stream.read(length))
        except RecursionError:
            raise ValueError("a header that is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("not a safetensors header")
    return header, 8 + length


def _problem(field: str, file: Path, message: str) -> JobFileError:
    return JobFileError([Problem(field, f"{file} {message}")])

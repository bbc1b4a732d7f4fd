"""Where the rows lie in an Arrow file, such as a file of a folder that `datasets` has written, found without a library.

An Arrow file, or stream, is a row of messages: a description of the columns, and batches, each with a list of where its
columns are in it. The numbers of a column of lists are one block in each batch, so that they can be mapped into memory.
See https://arrow.apache.org/docs/format/Columnar.html.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from trainer.contract.files import open_plain
from trainer.contract.settings.flatbuffer import Table
from trainer.contract.settings.rows import NotRowsError, RowRange, choose_column

_MAGIC = b"ARROW1\0\0"
_BEGINS = 0xFFFFFFFF
_LARGEST_HEADER = 100_000_000
# Levels of lists in lists; a batch of pictures has three.
_DEEPEST = 16
_SCHEMA, _RECORD_BATCH = 1, 3
_FLOATS, _FIXED_SIZE_LIST = 3, 16
# By type: the bytes of one offset into the entries.
_LISTS = {12: 4, 21: 8}
_DTYPES = ("F16", "F32", "F64")
_BYTES = {"F16": 2, "F32": 4, "F64": 8}
# By type, how many buffers it has; the buffers of nested columns come after. Null has none.
_BUFFERS = {
    1: 0,
    **dict.fromkeys((13, _FIXED_SIZE_LIST), 1),
    **dict.fromkeys((2, _FLOATS, 6, 7, 8, 9, 10, 11, 12, 15, 17, 18, 21), 2),
    **dict.fromkeys((4, 5, 19, 20), 3),
}


class _Message(NamedTuple):
    """`kind` is that of Arrow; `begin` and `n_bytes` are of what comes after the header."""

    kind: int
    header: Table
    begin: int
    n_bytes: int


class _Column(NamedTuple):
    """A column: its level and buffers count from the first of all columns; a list column includes its items."""

    name: str
    first_level: int
    first_buffer: int
    # From the outermost list to the numbers: Arrow's types.
    types: tuple[int, ...]
    dtype: str


def read_arrow_file(file: Path, name: str) -> list[RowRange]:
    """Find the rows of a column of lists: of the one by this name, or of the only one; one `RowRange` for each batch.

    Rows come from the innermost lists, so that [n_contexts, n_tokens, d_in] are n_contexts * n_tokens rows. Raise
    `OSError`, or `NotRowsError`.
    """
    with open_plain(file) as stream:
        try:
            return [*_batches(stream, name)]
        except (struct.error, OverflowError, RecursionError, UnicodeDecodeError):
            raise NotRowsError("it is damaged, or not an Arrow file; copy it again") from None


def _batches(stream: BinaryIO, name: str) -> Iterator[RowRange]:
    column = None
    for message in _messages(stream):
        if message.kind == _SCHEMA:
            column = _choose(message.header, name)
        elif message.kind == _RECORD_BATCH:
            if column is None:
                raise NotRowsError("it has rows before columns; copy it again")
            rows = _rows_of(message, column)
            if rows.n_tokens:
                yield rows


def _messages(stream: BinaryIO) -> Iterator[_Message]:
    place = len(_MAGIC) if stream.read(len(_MAGIC)) == _MAGIC else 0
    end = stream.seek(0, os.SEEK_END)
    stream.seek(place)
    while begins := stream.read(8):
        mark, size = struct.unpack("<II", begins)
        if mark != _BEGINS or size > _LARGEST_HEADER:
            raise NotRowsError("it is damaged, or not an Arrow file; copy it again")
        if not size:
            return
        message = Table.root(stream.read(size))
        header, n_bytes = message.table(2), message.number(3, "q")
        if header is None or n_bytes < 0:
            raise struct.error
        if place + 8 + size + n_bytes > end:
            raise NotRowsError("it is truncated; copy it again")
        yield _Message(message.number(1, "B"), header, place + 8 + size, n_bytes)
        place += 8 + size + n_bytes
        stream.seek(place)


def _choose(schema: Table, name: str) -> _Column:
    if schema.number(0, "h"):
        raise NotRowsError("its numbers are big-endian; write it again on a machine like this one")
    columns, level, buffer = [], 0, 0
    for field in schema.tables(1):
        columns.append(_column(field, level, buffer))
        n_levels, n_buffers = _count(field)
        level, buffer = level + n_levels, buffer + n_buffers
    fitting = {column.name: column for column in columns if column.dtype and len(column.types) > 1}
    return fitting[choose_column(name, [column.name for column in columns], [*fitting])]


def _column(field: Table, level: int, buffer: int) -> _Column:
    """Describe a column; one that is not of lists of numbers has no type of numbers."""
    column, types = field, [field.number(2, "B")]
    while (types[-1] in _LISTS or types[-1] == _FIXED_SIZE_LIST) and len(types) < _DEEPEST:
        entries = [*column.tables(5)]
        if len(entries) != 1:
            raise struct.error
        column = entries[0]
        types.append(column.number(2, "B"))
    numbers = column.table(3) if types[-1] == _FLOATS else None
    dtype = "" if numbers is None else _DTYPES[min(max(numbers.number(0, "h"), 0), 2)]
    return _Column(field.text(0), level, buffer, tuple(types), dtype)


def _count(field: Table, depth: int = 0) -> tuple[int, int]:
    """Return how many levels and buffers a column has, including nested columns."""
    kind = field.number(2, "B")
    if kind not in _BUFFERS or depth > _DEEPEST:
        raise NotRowsError(f"its column {field.text(0)!a} has an unsupported type; leave it out")
    if field.table(4) is not None:
        return 1, 2
    counts = [_count(child, depth + 1) for child in field.tables(5)]
    return 1 + sum(levels for levels, _ in counts), _BUFFERS[kind] + sum(buffers for _, buffers in counts)


def _rows_of(message: _Message, column: _Column) -> RowRange:
    batch = message.header
    if batch.table(3) is not None:
        raise NotRowsError("its batches are compressed; write it again without compression, as `datasets` does")
    levels, buffers = batch.structs(1, "<qq"), batch.structs(2, "<qq")
    own = levels[column.first_level :][: len(column.types)]
    first = column.first_buffer
    for kind in column.types[:-2]:
        first += _BUFFERS[kind]
    of_list, of_numbers = first, first + _BUFFERS[column.types[-2]] + 1
    if len(own) < len(column.types) or len(buffers) <= of_numbers or any(min(pair) < 0 for pair in (*own, *buffers)):
        raise struct.error
    if any(n_missing for _, n_missing in own):
        raise NotRowsError(f"rows or numbers are missing in its column {column.name!a}; leave them out")
    n_rows, n_numbers = own[-2][0], own[-1][0]
    if not n_rows:
        return RowRange(0, 0, 0, column.dtype)
    if n_numbers % n_rows:
        raise NotRowsError(f"the lists of its column {column.name!a} differ in length")
    (begin, size), (ends, size_of_ends) = buffers[of_numbers], buffers[of_list + 1]
    entry = _LISTS.get(column.types[-2], 0)
    if size < n_numbers * _BYTES[column.dtype] or (entry and size_of_ends < (n_rows + 1) * entry):
        raise NotRowsError("it is truncated; copy it again")
    lists = (message.begin + ends, entry) if entry else None
    return RowRange(message.begin + begin, n_rows, n_numbers // n_rows, column.dtype, lists)

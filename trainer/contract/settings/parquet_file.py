"""The number and width of the rows of a Parquet file, found in its footer without a library.

The rows themselves are packed, page by page: the trainer decodes them, with pyarrow. See
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

from trainer.contract.extras import install, is_installed
from trainer.contract.files import open_plain
from trainer.contract.settings.rows import NotRowsError, RowRange, choose_column
from trainer.contract.settings.thrift import read_struct

_MAGIC = b"PAR1"
_LARGEST_FOOTER = 100_000_000
# Numbers of the fields of Parquet's structs.
_SCHEMA, _ROW_GROUPS = 2, 4
_TYPE, _TYPE_LENGTH, _REPETITION, _NAME, _N_CHILDREN, _LOGICAL_TYPE = 1, 2, 3, 4, 5, 10
_COLUMNS, _N_ROWS = 1, 3
_METADATA, _PATH, _N_VALUES = 3, 3, 5
_REPEATED = 2
_FLOAT, _DOUBLE, _FIXED_BYTES, _FLOAT16 = 4, 5, 7, 15


class _Column(NamedTuple):
    """The numbers of a column, however deep in lists, and the type of them; "" where it is none of lists of numbers."""

    name: str
    dtype: str


def read_parquet_file(file: Path, name: str) -> RowRange:
    """Count the rows of a column of lists of numbers: of the one by this name, or of the only one.

    They begin nowhere, since they have to be decoded. Raise `OSError`, or `NotRowsError`.
    """
    if not is_installed("pyarrow"):
        raise NotRowsError(f"Parquet needs pyarrow: {install('parquet')}")
    try:
        footer = read_struct(_read_footer(file))
        columns = _columns(footer[_SCHEMA])
        chosen = choose_column(name, [one.name for one in columns], [one.name for one in columns if one.dtype])
        column = next(number for number, one in enumerate(columns) if one.name == chosen)
        n_rows, n_numbers = _count(footer[_ROW_GROUPS], column)
    except NotRowsError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, StopIteration, struct.error):
        raise NotRowsError("it is damaged, or not a Parquet file; copy it again") from None
    if n_rows and n_numbers % n_rows:
        raise NotRowsError(f"the lists of its column {chosen!a} differ in length, or some are missing")
    return RowRange(0, n_rows, n_numbers // n_rows if n_rows else 0, columns[column].dtype, column=chosen)


def _read_footer(file: Path) -> bytes:
    with open_plain(file) as stream:
        end = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, end - 8))
        size, magic = struct.unpack("<I4s", stream.read())
        if magic != _MAGIC or size > min(_LARGEST_FOOTER, end - 8):
            raise ValueError("not a Parquet file")
        stream.seek(end - 8 - size)
        return stream.read(size)


def _columns(schema: list[dict[int, Any]]) -> list[_Column]:
    """Return the leaves of the tree of columns, in their order: each with the name of the column that it is of."""
    entries = iter(schema)
    root = next(entries)
    columns = []
    for _ in range(root[_N_CHILDREN]):
        top = next(entries)
        name, lists, entry = top[_NAME].decode(), 0, top
        while entry.get(_N_CHILDREN) == 1:
            lists += entry.get(_REPETITION) == _REPEATED
            entry = next(entries)
        lists += entry.get(_REPETITION) == _REPEATED
        if entry.get(_N_CHILDREN):
            leaves = _skip(entries, entry[_N_CHILDREN])
            columns += [_Column(name, "")] * leaves
        else:
            columns.append(_Column(name, _dtype_of(entry) if lists == 1 else ""))
    return columns


def _skip(entries: Any, n_children: int) -> int:
    """Go past the columns of a struct; return how many leaves they have."""
    left, leaves = n_children, 0
    while left:
        of_this = next(entries).get(_N_CHILDREN) or 0
        left, leaves = left - 1 + of_this, leaves + (not of_this)
    return leaves


def _dtype_of(leaf: dict[int, Any]) -> str:
    is_half = leaf.get(_TYPE) == _FIXED_BYTES and _FLOAT16 in (leaf.get(_LOGICAL_TYPE) or {})
    return "F16" if is_half else {_FLOAT: "F32", _DOUBLE: "F64"}.get(leaf[_TYPE], "")


def _count(row_groups: list[dict[int, Any]], column: int) -> tuple[int, int]:
    """Return how many rows there are, and how many numbers a column has."""
    n_rows = sum(group[_N_ROWS] for group in row_groups)
    n_numbers = sum(group[_COLUMNS][column][_METADATA][_N_VALUES] for group in row_groups)
    if min(n_rows, n_numbers) < 0:
        raise ValueError
    return n_rows, n_numbers

"""What the header of any file with activations tells."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trainer.contract.wording import join_words


class Rows(msgspec.Struct, frozen=True):
    """Rows that lie in a file one after the other: the byte at which they begin, their number, width and type.

    A type that is read has the name that safetensors has for it, any other that of its format.
    """

    offset: int
    n_tokens: int
    d_in: int
    dtype: str
    # Where rows are lists that might differ in length: the byte at which the places of their ends are, of the first
    # row's begin first, and how many bytes each has.
    lists: tuple[int, int] | None = None
    # Where the file is packed (Parquet): the column to decode, of which no byte is a row.
    column: str | None = None


class NotRowsError(ValueError):
    """A file has no rows that can be read; the text says why, after "it is not an array of rows [n_tokens, d_in]:"."""


def choose_column(name: str, columns: Sequence[str], fitting: Sequence[str]) -> str:
    """Choose among the columns that are lists of numbers the one by this name, or the only one.

    Raise `NotRowsError` where there is neither.
    """
    if name in fitting:
        return name
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        listed = join_words([ascii(column) for column in fitting[:8]])
        raise NotRowsError(f"several columns are lists of numbers ({listed}); rename the one to read to `{name}`")
    listed = join_words([ascii(column) for column in columns[:8]] or ["none"])
    raise NotRowsError(f"no column is of lists of numbers; its columns: {listed}")

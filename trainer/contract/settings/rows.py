"""What the header of any file with activations tells."""

from __future__ import annotations

from typing import NamedTuple


class Rows(NamedTuple):
    """Rows that lie in a file one after the other: the byte at which they begin, their number, width and type.

    A type that is read has the name that safetensors has for it, any other that of its format.
    """

    offset: int
    n_tokens: int
    d_in: int
    dtype: str


class NotRowsError(ValueError):
    """A file has no rows that can be read; the text says why, after "it is not an array of rows [n_tokens, d_in]:"."""

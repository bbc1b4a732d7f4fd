"""Describes the rows in a file of activations, as recorded in the file's header."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from trainer.contract.wording import join_words

# Name prefixes for integer types in safetensors and torch.
_WHOLE = ("I", "U", "BOOL", "int", "uint", "bool")
_MOST_NAMES = 8
# The type of rows encoded as int8. In such a row, each group of 64 values has its own scale, a bfloat16 number. The
# scales follow the values, so that a row is one piece of a file.
INT8 = "INT8"
GROUP = 64
_SCALE_BYTES = 2
DTYPE_BYTES = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8, INT8: 1}


def row_bytes(d_in: int, dtype: str) -> int:
    """Return the number of bytes of a stored row."""
    return d_in * DTYPE_BYTES[dtype] + (_SCALE_BYTES * -(-d_in // GROUP) if dtype == INT8 else 0)


class RowRange(msgspec.Struct, frozen=True):
    """Consecutive rows in a file: the byte offset of the first row, and the number, dimension and type of the rows.

    Supported types are named as in safetensors; other types keep the names from their own format.
    """

    offset: int
    n_tokens: int
    d_in: int
    dtype: str
    # If rows are stored as lists of variable length: the byte offset of the list offsets, and the bytes per offset. The
    # first list offset is the start of the first row.
    lists: tuple[int, int] | None = None
    # In a Parquet file, the column to decode, because its compressed bytes are not plain rows.
    column: str | None = None
    # The byte offset of the mean that was subtracted from rows encoded as int8.
    mean: int | None = None

    @property
    def n_bytes(self) -> int:
        """The size of the rows."""
        return self.n_tokens * row_bytes(self.d_in, self.dtype)


class NotRowsError(ValueError):
    """An error for a file without readable rows.

    The message is the reason, to be shown after "it is not an array of rows [n_tokens, d_in]:".
    """


def rows_and_width(shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of rows and d_in of a tensor [..., d_in]; raise `NotRowsError` if it is only 1-D or 0-D."""
    if len(shape) < 2:
        raise NotRowsError(f"its shape is {[*shape]}; reshape it to [-1, d_in]")
    return math.prod(shape[:-1]), shape[-1]


def choose_tensor(name: str, tensors: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """Return the name of the tensor to read: `name`, or the only tensor with a non-integer type.

    `tensors` maps each name to the tensor's type and shape. Raise `NotRowsError` if the choice is ambiguous.
    """
    if name in tensors:
        return name
    others = [one for one, (dtype, _) in tensors.items() if not dtype.startswith(_WHOLE)]
    if len(others) == 1:
        return others[0]
    if not tensors:
        raise NotRowsError(f"it contains no tensor; save the rows as `{name}`")
    more = [f"{len(tensors) - _MOST_NAMES} more"] if len(tensors) > _MOST_NAMES else []
    listed = [f"{one!a} {[*shape]}" for one, (_, shape) in [*tensors.items()][:_MOST_NAMES]]
    raise NotRowsError(f"it contains no tensor `{name}`, but {join_words([*listed, *more])}; rename the one to read")


# Usual names of a column with activations, in the order in which they are preferred.
VECTORS = ("activation_vector", "activation", "activations_vector", "vector", "hidden_states", "hidden_state")


def choose_column(name: str, columns: Sequence[str], fitting: Sequence[str]) -> str:
    """Return the column to read: `name`, a usual name, or the only column in `fitting`.

    `fitting` contains the columns with lists of numbers. Raise `NotRowsError` if there is no such column or the choice
    is ambiguous.
    """
    if known := next((one for one in (name, *VECTORS) if one in fitting), None):
        return known
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        listed = join_words([ascii(column) for column in fitting[:8]])
        raise NotRowsError(f"several columns are lists of numbers ({listed}); rename the one to read to `{name}`")
    listed = join_words([ascii(column) for column in columns[:8]] or ["none"])
    raise NotRowsError(f"no column contains lists of numbers; its columns: {listed}")

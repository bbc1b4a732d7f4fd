"""Reads the header of a .npy file (formats 1.0 to 3.0) without numpy."""

from __future__ import annotations

import ast
import struct
from pathlib import Path

from trainer.contract.files import open_plain
from trainer.contract.settings.rows import NotRowsError, RowRange, rows_and_width

_MAGIC = b"\x93NUMPY"
# NumPy's own limit.
_LARGEST_HEADER = 10_000
# Maps numpy names for the supported types to safetensors names.
_DTYPES = {"<f4": "F32", "<f2": "F16", "|V2": "BF16", "<V2": "BF16", "<f8": "F64"}


def read_npy(file: Path) -> RowRange:
    """Return the rows of an array [..., d_in]; an array [n_contexts, n_tokens, d_in] has n_contexts * n_tokens rows.

    Raise `OSError` if the file cannot be read, and `NotRowsError` if it does not contain such an array.
    """
    with open_plain(file) as stream:
        magic, major, _ = stream.read(6), *stream.read(2).ljust(2, b"\0")
        form = "<H" if major == 1 else "<I"
        size = struct.calcsize(form)
        (length,) = struct.unpack(form, stream.read(size).ljust(size, b"\0"))
        if magic != _MAGIC or not 0 < length <= _LARGEST_HEADER:
            raise NotRowsError("it has no NumPy header")
        text = stream.read(length)
    try:
        header = ast.literal_eval(text.decode("utf-8" if major == 3 else "latin1").strip())
        shape, dtype, is_column_major = header["shape"], header["descr"], header["fortran_order"]
        if not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError
        rows, width = rows_and_width(shape)
    except NotRowsError:
        raise
    except (ValueError, SyntaxError, TypeError, LookupError, RecursionError, MemoryError):
        raise NotRowsError("its header is corrupt") from None
    if is_column_major and width > 1:
        raise NotRowsError("it is in Fortran order; save it with np.ascontiguousarray")
    return RowRange(8 + size + length, rows, width, _DTYPES.get(str(dtype), str(dtype)))

"""Finds the rows in torch.save, Arrow and Parquet files with torch and pyarrow, without running code from a file.

Each library is imported only when a file first needs it; opening Arrow files, for example, does not import torch.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainer.contract.files import open_plain
from trainer.contract.object_paths import url_of
from trainer.contract.settings.rows import NotRowsError, RowRange, choose_column, choose_tensor, rows_and_width
from trainer.contract.settings.shards import TENSOR, ShardSet, inspect_objects, shard_set

if TYPE_CHECKING:
    import pyarrow
    from torch import Tensor

# The maximum pickle size in bytes. Each tensor takes about 300 bytes, so a larger pickle must contain numbers or
# strings as Python objects.
_LARGEST_PICKLE = 10_000_000
# The first bytes of a file in the pre-1.6 torch format, which later versions can also write.
_OLD_FORMAT = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_SAVE_AGAIN = 'save it again with torch.save({"activations": x.contiguous()}, file)'
# Matches, in a torch error message, the name of the class or function that torch refuses to call.
_REFUSED = re.compile(r"GLOBAL (\S*\w)\s")
_ARROW_FILE = b"ARROW1"
_DTYPES = {"halffloat": "F16", "float": "F32", "double": "F64"}
# The maximum nesting depth of lists. A batch of images has a depth of three.
_DEEPEST = 16


def inspect(root: Path, files: Sequence[Path], field: str) -> ShardSet:
    """Return the shards at a data path; raise a `JobFileError` that names `field` if they cannot be read."""
    if url_of(root):
        return inspect_objects(root, field)
    return shard_set(root, files, field, read_rows)


def read_rows(file: Path) -> list[RowRange]:
    """Find the rows in a file; raise `OSError` or `NotRowsError` if the file has no readable rows."""
    with open_plain(file) as stream:
        # With this path, the libraries open the file that was checked, even if its name is not UTF-8.
        opened = f"/proc/self/fd/{stream.fileno()}"
        if file.suffix == ".arrow":
            return _rows_of_arrow(opened)
        if file.suffix == ".parquet":
            return [_rows_of_parquet(opened)]
        refuse_old_format(file)
        return [_rows_of_torch(opened, _members(stream))]


def _rows_of_torch(file: str, members: list[tuple[int, int]]) -> RowRange:
    import torch

    try:
        with warnings.catch_warnings():
            # torch warns about pickles with other protocols, but either reads them correctly or refuses them.
            warnings.simplefilter("ignore")
            value = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        if refused := _REFUSED.search(str(error)):
            raise NotRowsError(f"it can only be read by running code ({refused[1][:80]}); {_SAVE_AGAIN}") from None
        raise NotRowsError(f"it is damaged, or contains more than tensors; {_SAVE_AGAIN}") from None
    if isinstance(value, dict):
        tensors = {name: one for name, one in value.items() if isinstance(name, str) and isinstance(one, torch.Tensor)}
        value = tensors[choose_tensor(TENSOR, {name: (_dtype_of(one), one.shape) for name, one in tensors.items()})]
    if not isinstance(value, torch.Tensor):
        raise NotRowsError(f"it contains no tensor; {_SAVE_AGAIN}")
    n_rows, d_in = rows_and_width(value.shape)
    if value.layout != torch.strided or not value.is_contiguous():
        raise NotRowsError(f"its tensor is not contiguous; {_SAVE_AGAIN}")
    if not value.numel():
        return RowRange(0, n_rows, d_in, _dtype_of(value))
    begin = _offset_in_file(value)
    _, n_bytes = max((member for member in members if member[0] <= begin), default=(0, 0))
    if (value.storage_offset() + value.numel()) * value.itemsize > n_bytes:
        raise NotRowsError("its tensor is larger than the file; copy it again")
    return RowRange(begin, n_rows, d_in, _dtype_of(value))


def refuse_old_format(file: Path) -> None:
    """Raise `NotRowsError` if a file is in the pre-1.6 torch.save format."""
    with open_plain(file) as stream:
        if stream.read(len(_OLD_FORMAT)) == _OLD_FORMAT:
            raise NotRowsError("it is in the format of torch.save before 1.6; load it with torch and save it again")


def _members(stream: BinaryIO) -> list[tuple[int, int]]:
    """Return the header offset and size, in bytes, of each member of a zip file written by torch.save.

    Raise `NotRowsError` if a member is compressed or big-endian, or if torch.save did not write the zip file.
    """
    try:
        with zipfile.ZipFile(stream) as archive:
            members = {entry.filename: entry for entry in archive.infolist()}
            pickle = next((entry for name, entry in members.items() if name.endswith("/data.pkl")), None)
            if pickle is None:
                raise NotRowsError(f"it is a zip file that torch.save did not write; {_SAVE_AGAIN}")
            if pickle.file_size > _LARGEST_PICKLE:
                raise NotRowsError(f"it contains more than tensors; {_SAVE_AGAIN}")
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in members.values()):
                raise NotRowsError(f"it is compressed; {_SAVE_AGAIN}")
            order = pickle.filename.removesuffix("data.pkl") + "byteorder"
            if order in members and archive.read(order) != b"little":
                raise NotRowsError(f"its numbers are big-endian; {_SAVE_AGAIN} on a machine like this one")
            return [(entry.header_offset, entry.file_size) for entry in members.values()]
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, UnicodeDecodeError):
        raise NotRowsError(f"it is damaged, or was not written by torch.save; {_SAVE_AGAIN}") from None


def _dtype_of(tensor: Tensor) -> str:
    """Return the safetensors name of a tensor's dtype if rows of this dtype can be read, otherwise torch's name."""
    name = str(tensor.dtype).removeprefix("torch.")
    return {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}.get(name, name)


def _offset_in_file(tensor: Tensor) -> int:
    """Return the byte offset of a mapped tensor in its file, from the kernel's list of memory mappings.

    torch knows this offset too, but exposes it only since version 2.7, and only for tensors without data.
    """
    place = tensor.data_ptr()
    with open("/proc/self/maps", "rb") as mappings:
        for line in mappings:
            span, _, offset, _, inode, *_ = line.split()
            first, end = (int(bound, 16) for bound in span.split(b"-"))
            if first <= place < end and inode != b"0":
                return place - first + int(offset, 16)
    raise NotRowsError(f"its tensor cannot be mapped from the file; {_SAVE_AGAIN}")


def _rows_of_arrow(file: str) -> list[RowRange]:
    import pyarrow as pa

    try:
        with pa.memory_map(file) as mapped:
            return [*_batches(mapped.read_buffer())]
    except NotRowsError:
        raise
    except (pa.ArrowException, OSError, OverflowError, ValueError):
        raise NotRowsError("it is truncated or damaged, or not an Arrow file; copy it again") from None


def _batches(whole: pyarrow.Buffer) -> Iterator[RowRange]:
    """Yield the location of each record batch's rows; every innermost list is one row.

    For example, lists of shape [n_contexts, n_tokens, d_in] contain n_contexts * n_tokens rows.
    """
    from pyarrow import ipc

    is_file = whole[: len(_ARROW_FILE)].to_pybytes() == _ARROW_FILE
    reader = (ipc.open_file if is_file else ipc.open_stream)(whole)
    schema = reader.schema
    dtypes = [_dtype_of_lists(column.type) for column in schema]
    fitting = [name for name, dtype in zip(schema.names, dtypes, strict=True) if dtype]
    name = choose_column(TENSOR, schema.names, fitting)
    number = next(number for number, dtype in enumerate(dtypes) if dtype and schema.names[number] == name)
    for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
        column = batch.column(number)
        column.validate()
        if len(column):
            yield _rows_of_batch(column, name, dtypes[number], whole)


def _rows_of_batch(column: Any, name: str, dtype: str, whole: pyarrow.Buffer) -> RowRange:
    lists = numbers = _plain(column)
    has_gaps = False
    while _is_list(numbers.type):
        has_gaps |= numbers.null_count > 0
        lists, numbers = numbers, _plain(numbers.values)
    if has_gaps or numbers.null_count:
        raise NotRowsError(f"its column {name!a} has missing rows or values; remove them")
    if not len(lists) or len(numbers) % len(lists):
        raise NotRowsError(f"the lists in its column {name!a} differ in length")
    if not len(numbers):
        return RowRange(0, len(lists), 0, dtype)
    ends, values = lists.buffers()[1], numbers.buffers()[1]
    n_bytes = {"list": 4, "large_list": 8}.get(str(lists.type).partition("<")[0])
    offsets = [one.address - whole.address for one in ((ends, values) if n_bytes else (values,))]
    if any(not 0 <= offset <= whole.size for offset in offsets):
        raise NotRowsError("its batches are compressed or big-endian; write it again without compression")
    place = (offsets[0], n_bytes) if n_bytes else None
    return RowRange(offsets[-1], len(lists), len(numbers) // len(lists), dtype, place)


def _plain(column: Any) -> Any:
    """Return the storage of a column with an extension type (as written by `datasets`), or any other column itself."""
    return getattr(column, "storage", column)


def _dtype_of_lists(kind: Any, deepest: int = _DEEPEST) -> str:
    """Return the dtype of numbers in lists nested at most `deepest` levels deep, or "" for any other type."""
    depth, kind = 0, getattr(kind, "storage_type", kind)
    while _is_list(kind):
        depth, kind = depth + 1, getattr(kind.value_type, "storage_type", kind.value_type)
    return _DTYPES.get(str(kind), "") if 0 < depth <= deepest else ""


def _is_list(kind: Any) -> bool:
    return str(kind).startswith(("list<", "large_list<", "fixed_size_list<"))


def _rows_of_parquet(file: str) -> RowRange:
    """Count the rows in a Parquet file and decode the first row; the offset is 0, since encoded rows cannot be mapped.

    The lengths of the other rows are checked during decoding. Reading the number of values from a damaged footer
    instead would make pyarrow abort the process.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file) as opened:
            schema, n_rows = opened.schema_arrow, opened.metadata.num_rows
            dtypes = {column.name: dtype for column in schema if (dtype := _dtype_of_lists(column.type, deepest=1))}
            name = choose_column(TENSOR, schema.names, [*dtypes])
            first = next(opened.iter_batches(1, columns=[name]), None) if n_rows > 0 else None
            d_in = first.column(0).value_lengths()[0].as_py() if first else 0
    except NotRowsError:
        raise
    except (pa.ArrowException, OSError, ValueError, IndexError):
        raise NotRowsError("it is damaged, or not a Parquet file; copy it again") from None
    if d_in is None:
        raise NotRowsError(f"its column {name!a} has missing rows; remove them")
    return RowRange(0, n_rows if d_in else 0, d_in, dtypes[name], column=name)

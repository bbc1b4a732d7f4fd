"""Reads documents from local files or from a data set on the hub, always in the same order."""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from trainer.contract.errors import UserError, first_line
from trainer.contract.extras import install
from trainer.contract.files import open_plain
from trainer.contract.settings.declare import show
from trainer.contract.settings.language import TEXT_SUFFIXES, TextSettings, lack_of_text

# A text, a chat's messages, or token ids.
Document = str | list[dict[str, Any]] | list[int]
# The columns that the setting "auto" tries, in this order.
COLUMNS = ("text", "content", "document", "messages", "conversations", "input_ids", "tokens")
# The column with the attention mask for token ids; the mask is 0 for padding.
MASK = "attention_mask"
# Maps ShareGPT's speaker names to the roles of chat templates.
_ROLES = {"human": "user", "gpt": "assistant"}
# The size, in bytes, after which a text file is split at the next line end. Each piece is a separate document, so the
# file does not have to fit in memory.
_LONGEST = 2**20
# The maximum row size, in bytes or characters. Longer rows are rejected, because a tokenizer needs memory for several
# copies of a row.
_LONGEST_ROW = 16 * 2**20
# The maximum JSON file size, in bytes. The entire file is loaded into memory.
_LARGEST_JSON = 256 * 2**20
# The number of Parquet or Arrow rows to read at a time. Rows of at most `_BYTES_AT_ONCE` bytes in total are converted
# to Python objects in one call. Larger rows are converted one at a time, because decoding a dictionary column can
# multiply its size by the row count.
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 64, 16 * 2**20
# Two limits on the in-memory size of one column of a row group: in bytes, and as a multiple of the stored bytes. The
# larger one applies. Without a limit, a few stored bytes could expand to billions of equal numbers.
_LARGEST_GROUP, _MOST_OF_A_BYTE = 2**30, 1000
_TOO_LONG = f"is longer than {_LONGEST_ROW >> 20} MiB; split it into several lines"


def documents(text: TextSettings) -> Iterator[Document]:
    """Yield the documents selected by the settings; raise `UserError` if they cannot be read."""
    if text.path is None:
        yield from _of_rows(_hub_rows(text), text, str(text.dataset))
        return
    root = Path(text.path)
    if is_data_set(text.path):
        yield from _of_rows(_saved_rows(root, text), text, text.path)
        return
    for file in _files(root):
        yield from _of_file(file, text)


def mended(value: Any) -> Any:
    """Return a string or chat with each unpaired surrogate replaced with U+FFFD.

    JSON strings that were truncated within a character can contain unpaired surrogates, which no tokenizer accepts.
    """
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, dict):
        return {name: mended(one) for name, one in value.items()}
    return [mended(one) for one in value] if isinstance(value, list) else value


def is_data_set(path: str) -> bool:
    """Return whether a folder was written by `save_to_disk` from the datasets library."""
    return any((Path(path) / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def _files(root: Path) -> list[Path]:
    if lack := lack_of_text(str(root)):
        raise UserError(f"text.path: {lack}")
    if root.is_file():
        return [root]
    files = sorted(file for file in root.rglob("*") if file.suffix in TEXT_SUFFIXES and file.is_file())
    if not files:
        raise UserError(f"text.path: {root} contains no file that ends in {', '.join(TEXT_SUFFIXES)}")
    return files


def _of_file(file: Path, text: TextSettings) -> Iterator[Document]:
    try:
        if file.suffix == ".parquet":
            yield from _of_rows(_parquet_rows(file, text.column), text, str(file))
        elif file.suffix == ".jsonl":
            yield from _of_rows(_json_lines(file), text, str(file))
        elif file.suffix == ".json":
            with open_plain(file) as stream:
                rows = json.loads(_whole_json(stream, file))
            yield from _of_rows(iter(rows if isinstance(rows, list) else [rows]), text, str(file))
        else:
            yield from _pieces(file)
    except OSError as error:
        raise UserError(f"text.path: {file} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UserError(f"text.path: {file} is not UTF-8") from None
    except MemoryError:
        raise UserError(f"text.path: {file} does not fit in memory; split it into smaller rows") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"text.path: {file} cannot be read: {first_line(error)}") from None


def _pieces(file: Path) -> Iterator[str]:
    # Decode incrementally, because a long line may be split within a character.
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_plain(file) as stream:
        while lines := stream.read(_LONGEST) + stream.readline(_LONGEST_ROW):
            # Windows editors write a byte order mark before the text.
            yield decoder.decode(lines).removeprefix("\ufeff")
        decoder.decode(b"", final=True)


def _whole_json(stream: BinaryIO, file: Path) -> bytes:
    content = stream.read(_LARGEST_JSON + 1)
    if len(content) > _LARGEST_JSON:
        raise UserError(
            f"text.path: {file} is larger than {_LARGEST_JSON >> 20} MiB; write one row per line in a .jsonl file"
        )
    return content


def _json_lines(file: Path) -> Iterator[Any]:
    with open_plain(file) as stream:
        for number in itertools.count(1):
            line = stream.readline(_LONGEST_ROW + 1)
            if len(line) > _LONGEST_ROW:
                raise UserError(f"text.path: line {number} of {file} {_TOO_LONG}")
            if not line:
                return
            if line.strip():
                yield json.loads(line)


def _parquet_rows(file: Path, column: str) -> Iterator[Any]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"text.path: reading .parquet needs `{install('hf')}`") from None

    parquet = pyarrow.parquet.ParquetFile(file)
    texts = [column.path for column in parquet.schema if column.physical_type == "BYTE_ARRAY"]
    # Keep the dictionary encoding. If expanded, the repeated values in a 2 kB file could exhaust memory.
    parquet = pyarrow.parquet.ParquetFile(file, read_dictionary=texts)
    wanted = {*COLUMNS} if column == "auto" else {column}
    names = [name for name in parquet.schema_arrow.names if name in wanted]
    columns = [*names, *({MASK} & {*parquet.schema_arrow.names})] if names else None
    for number in range(parquet.num_row_groups):
        _refuse_bomb(parquet.metadata.row_group(number), columns, file)
        batches = parquet.iter_batches(_ROWS_AT_ONCE, row_groups=[number], columns=columns)
        for batch in batches:
            yield from _plain_rows(batch)


def _refuse_bomb(group: Any, names: Sequence[str] | None, file: Path) -> None:
    """Raise `UserError` if numbers in the given columns (all columns if None) need far more memory than disk space."""
    columns = [group.column(place) for place in range(group.num_columns)]
    if names is not None:
        columns = [one for one in columns if f"{one.path_in_schema}.".startswith(tuple(f"{name}." for name in names))]
    # Compare with the stored bytes of all columns, because an all-ones attention mask takes almost no disk space.
    stored = max(1, sum(one.total_uncompressed_size for one in columns))
    for column in columns:
        taken = 8 * column.num_values
        if column.physical_type != "BYTE_ARRAY" and taken > max(_LARGEST_GROUP, _MOST_OF_A_BYTE * stored):
            many = f"{column.num_values:,} values of {column.path_in_schema} in {stored:,} bytes"
            raise UserError(f"text.path: {file} claims {many}, which is not plausible; leave it out")


def _plain_rows(rows: Any) -> Iterator[Any]:
    """Yield the rows of an Arrow table or batch, one at a time if they are large."""
    step = len(rows) if rows.nbytes <= _BYTES_AT_ONCE else 1
    for start in range(0, len(rows), step or 1):
        yield from _as_python(rows.slice(start, step))


def _as_python(rows: Any) -> list[Any]:
    """Return the rows of an Arrow table or batch; bytes that are not UTF-8 become unpaired surrogates."""
    try:
        return list(rows.to_pylist())
    except UnicodeDecodeError:
        columns = {field.name: rows.column(field.name).cast(_as_bytes(field.type)) for field in rows.schema}
        plain = {name: [_decoded(one) for one in column.to_pylist()] for name, column in columns.items()}
        return [dict(zip(plain, row, strict=True)) for row in zip(*plain.values(), strict=True)]


def _as_bytes(kind: Any) -> Any:
    """Return an Arrow type with all string types, including nested ones, replaced with binary types."""
    import pyarrow

    types = pyarrow.types
    if types.is_dictionary(kind):
        return _as_bytes(kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind):
        return pyarrow.large_binary()
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(_as_bytes(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        list_of = pyarrow.list_ if types.is_list(kind) else pyarrow.large_list
        return list_of(kind.value_field.with_type(_as_bytes(kind.value_type)))
    return kind


def _decoded(value: Any) -> Any:
    """Return a value in which all bytes, including nested ones, are decoded to text."""
    if isinstance(value, dict):
        return {name: _decoded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return value.decode("utf-8", "surrogateescape")


def _hub_rows(text: TextSettings) -> Iterator[Any]:
    """Yield the rows of a data set on the hub while downloading it, without storing it."""
    datasets = _load_datasets()
    try:
        yield from datasets.load_dataset(text.dataset, text.subset, split=text.split, streaming=True)
    except Exception as error:
        # The datasets library raises dozens of exception classes for wrong names, wrong splits and network errors.
        raise UserError(f"text.dataset: {text.dataset} cannot be read: {first_line(error)}") from None


def _saved_rows(root: Path, text: TextSettings) -> Iterator[Any]:
    """Yield the rows of a data set written by `save_to_disk` from the datasets library."""
    datasets = _load_datasets()
    try:
        stored = datasets.load_from_disk(str(root))
    except Exception as error:
        # The cause may be a damaged or missing JSON file, or an Arrow exception.
        raise UserError(f"text.path: {root} cannot be read: {first_line(error)}") from None
    if isinstance(stored, dict):
        if text.split not in stored:
            raise UserError(f"text.split: {root} has no {show(text.split)}, only {', '.join(stored)}")
        stored = stored[text.split]
    for rows in stored.with_format("arrow").iter(_ROWS_AT_ONCE):
        yield from _plain_rows(rows)


def _load_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(f"text: reading a data set needs `{install('hf')}`") from None
    return datasets


def _of_rows(rows: Iterator[Any], text: TextSettings, place: str) -> Iterator[Document]:
    """Yield the document in the requested column of each row; skip rows without a value in this column."""
    column = None if text.column == "auto" else text.column
    for number, row in enumerate(rows):
        if isinstance(row, str) and column is None:
            yield row
            continue
        if not isinstance(row, Mapping):
            raise UserError(f"text.path: row {number} of {place} is not an object with a text column")
        column = column or next((name for name in COLUMNS if row.get(name) is not None), None)
        if column is None and not {*COLUMNS}.isdisjoint(row):
            continue
        if column is None or column not in row:
            wanted = f"no {show(text.column)}" if text.column != "auto" else f"none of {', '.join(COLUMNS)}"
            raise UserError(f"text.column: row {number} of {place} has {wanted}, only {', '.join(map(str, row))}")
        if row[column] is not None:
            yield _document(row, column, f"row {number} of {place}")


def _document(row: Mapping[str, Any], column: str, place: str) -> Document:
    value = row[column]
    if isinstance(value, str):
        if len(value) > _LONGEST_ROW:
            raise UserError(f"text.path: {place} {_TOO_LONG}")
        return value
    if isinstance(value, list) and all(isinstance(one, int) for one in value):
        return _unfilled(value, row.get(MASK), place)
    if _is_chat(value, "role"):
        return value
    if _is_chat(value, "from", "value"):
        return [{"role": _ROLES.get(one["from"], one["from"]), "content": one["value"]} for one in value]
    raise UserError(f"text.column: {show(column)} of {place} is not text, a chat or token ids")


def _is_chat(value: Any, *keys: str) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(one, dict) and one.keys() >= {*keys} for one in value)


def _unfilled(ids: list[int], mask: Any, place: str) -> list[int]:
    """Return the token ids without padding."""
    if mask is None:
        return ids
    if not isinstance(mask, list) or len(mask) != len(ids):
        raise UserError(f"text.column: {MASK} of {place} does not have a number for each of its {len(ids)} token ids")
    return [one for one, counts in zip(ids, mask, strict=True) if counts]

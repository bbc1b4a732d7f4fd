"""Writes pairs of an activation and the text around its token to a Parquet file, for training activation explainers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.checkpoints.atomic_folder import not_written
from trainer.contract.errors import UsageError, UserError
from trainer.contract.extras import install, is_installed
from trainer.contract.paths import file_mode
from trainer.contract.progress import track
from trainer.contract.settings.tokens_of_data import TOKEN_TEXTS
from trainer.evaluation.contexts import TokenRows, texts_of
from trainer.extraction.shard_writer import RowOrigin
from trainer.extraction.token_bytes import read_tokens

# The name that trainers of activation explainers give the column.
VECTOR = "activation_vector"
_ROWS_AT_ONCE = 1024


def write_pairs(data: Path, file: Path, n_before: int, n_after: int, most: int) -> int:
    """Write a pair for each of the first `most` rows, and return their number; raise `UserError` on failure.

    `text` ends with the row's token, after up to `n_before` tokens of the same document; `text_after` has up to
    `n_after` tokens. Tokens whose rows were left out are missing from the texts.
    """
    if not is_installed("pyarrow"):
        raise UserError(f"writing Parquet needs pyarrow: {install('parquet')}")
    if file.exists() or file.is_symlink():
        raise UsageError(f"{file} exists; name a new file")
    lack = f"{data}: the rows do not record their tokens, or {TOKEN_TEXTS} is missing; extract them again"
    if not (tokens := read_tokens(data)):
        raise UserError(lack)
    n_pairs = 0
    temporary = file.with_name(f".{file.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        with open(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as stream:
            for number in track(_write(stream, texts_of(data, most), tokens, n_before, n_after), "writing pairs"):
                n_pairs += number
            os.fsync(stream.fileno())
        if not n_pairs:
            raise UserError(lack)
        temporary.chmod(file_mode(file.parent))
        os.replace(temporary, file)
    except OSError as error:
        raise not_written(file, error.strerror or str(error), error.errno) from None
    finally:
        temporary.unlink(missing_ok=True)
    return n_pairs


def _write(
    stream: Any, texts: Iterator[TokenRows], tokens: Sequence[bytes], n_before: int, n_after: int
) -> Iterator[int]:
    """Write the pairs of each text, and yield the number of pairs written at a time."""
    from pyarrow import parquet

    writer = None
    for text in texts:
        for first in range(0, len(text.x), _ROWS_AT_ONCE):
            rows = range(first, min(first + _ROWS_AT_ONCE, len(text.x)))
            batch = _table(text.x[rows.start : rows.stop], text.origin, rows, tokens, n_before, n_after)
            writer = writer or parquet.ParquetWriter(stream, batch.schema)
            writer.write_table(batch)
            yield len(rows)
    if writer:
        writer.close()


def _table(x: Tensor, origin: RowOrigin, rows: range, tokens: Sequence[bytes], n_before: int, n_after: int) -> Any:
    import pyarrow as pa

    documents, ids = origin.document.tolist(), origin.token_ids.tolist()

    def text_of(row: int, places: range) -> str:
        own = (ids[at] for at in places if 0 <= at < len(ids) and documents[at] == documents[row])
        return b"".join(tokens[one] for one in own if 0 <= one < len(tokens)).decode("utf-8", "replace")

    values = pa.array(x.float().flatten().numpy())
    return pa.table(
        {
            VECTOR: pa.FixedSizeListArray.from_arrays(values, x.shape[1]),
            "text": [text_of(row, range(row - n_before, row + 1)) for row in rows],
            "token": [text_of(row, range(row, row + 1)) for row in rows],
            "text_after": [text_of(row, range(row + 1, row + 1 + n_after)) for row in rows],
            "position": origin.positions[rows.start : rows.stop].numpy(),
            "document": origin.document[rows.start : rows.stop].numpy(),
        }
    )

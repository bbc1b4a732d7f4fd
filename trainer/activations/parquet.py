"""Decodes Parquet files once into a temporary file, so that rows are read from it as from other shards.

Parquet compresses rows in pages, so reading a batch of random rows would decode the entire file. The temporary file is
in `TMPDIR`. It has no name, so it disappears with the process; each rank has its own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from trainer.contract.errors import JobFileError, Problem, first_line
from trainer.contract.settings.shards import DTYPE_BYTES, Shard
from trainer.contract.wording import gibibytes

# Rows in memory at a time; these take 40 MB at d_in 2304.
_ROWS_AT_ONCE = 4096


def decode(shard: Shard, field: str) -> NDArray[np.uint8]:
    """Return the bytes of a file's rows, memory-mapped; raise a `JobFileError` that names `field` if that fails."""
    size, folder = shard.n_tokens * shard.d_in * DTYPE_BYTES[shard.dtype], Path(tempfile.gettempdir())
    if (free := shutil.disk_usage(folder).free) < size:
        need = f"takes {gibibytes(size)} once it is decoded, and {folder} has {gibibytes(free)} left"
        raise _problem(
            field, shard, f"{need}; set TMPDIR to a folder with more space, or store the rows as safetensors"
        )
    with tempfile.TemporaryFile() as file:
        try:
            _write(shard, file, field)
        except OSError as error:
            raise _problem(field, shard, f"cannot be decoded to {folder}: {first_line(error)}") from None
        file.flush()
        return np.memmap(file, np.uint8, "r", shape=(size,))


def _write(shard: Shard, file: IO[bytes], field: str) -> None:
    n_rows = 0
    for rows in _batches(shard, field):
        file.write(np.ascontiguousarray(rows).data)
        n_rows += len(rows)
    if n_rows != shard.n_tokens:
        raise _problem(field, shard, f"has {n_rows:,} rows, not the {shard.n_tokens:,} in its header; copy it again")


def _batches(shard: Shard, field: str) -> Iterator[NDArray[Any]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(shard.file) as parquet:
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, columns=[shard.column]):
                lists = batch.column(0)
                numbers = lists.flatten()
                lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
                if lists.null_count or numbers.null_count or (lengths != shard.d_in).any():
                    raise _problem(field, shard, "has lists that differ in length, or numbers that are missing")
                yield numbers.to_numpy().reshape(len(lists), shard.d_in)
    except pyarrow.ArrowException as error:
        raise _problem(field, shard, f"cannot be decoded: {first_line(error)}") from None


def _problem(field: str, shard: Shard, message: str) -> JobFileError:
    return JobFileError([Problem(field, f"{shard.file} {message}")])

"""Helpers for shard tests: random rows, tables with a column of rows, and the error raised for a folder of shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from trainer.contract.errors import JobFileError
from trainer.contract.settings.shards import inspect_shards

# The start of the error message about a file without rows.
BEGINS = "is not an array of rows [n_tokens, d_in]: "


def rows(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    """Return normally distributed numbers that depend only on the shape."""
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def lists(*values: Any, kind: pa.DataType | None = None) -> pa.Table:
    """Return a table with a column `x` of lists of numbers."""
    return pa.table({"x": pa.array(list(values), kind or pa.list_(pa.float32()))})


def problem(folder: Path, read: Callable[[Path], object] = inspect_shards) -> str:
    """Return the one-sentence error for a folder of shards."""
    with pytest.raises(JobFileError) as caught:
        read(folder)
    (refusal,) = caught.value.problems
    assert refusal.path == "data.path"
    assert "\n" not in refusal.message
    return refusal.message

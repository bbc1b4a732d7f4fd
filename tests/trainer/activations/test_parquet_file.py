"""Tests that Parquet files can be read as shards with pyarrow."""

from __future__ import annotations

import importlib.util
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shard_files import BEGINS, lists, problem, rows

from trainer.activations.foreign import read_rows
from trainer.activations.shards import Shards
from trainer.contract.settings.rows import NotRowsError


def shards(folder: Path) -> Shards:
    return Shards(path=str(folder))


@pytest.mark.parametrize(
    "options", [{}, {"compression": "none", "use_dictionary": False}, {"data_page_version": "2.0"}]
)
@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.float32()),
        pa.list_(pa.float32(), 8),
        pa.list_(pa.float16()),
        pa.large_list(pa.field("item", pa.float32(), nullable=False)),
    ],
    ids=str,
)
def test_rows_are_read_back_unchanged(kind: pa.DataType, options: dict[str, Any], tmp_path: Path) -> None:
    x = rows(10_000, 8, dtype=kind.value_type.to_pandas_dtype())
    table = pa.table(
        {
            "text": [f"row {number}" for number in range(len(x))],
            "pair": [{"a": 1, "b": {"c": 2.0, "d": [1]}}] * len(x),
            "blocks.0.hook": pa.array(x.tolist(), kind),
            "tokens": [[1, 2, 3]] * len(x),
        }
    )
    pq.write_table(table.slice(0, 6000), tmp_path / "a.parquet", row_group_size=1000, **options)
    pq.write_table(table.slice(6000), tmp_path / "b.parquet", **options)
    source = shards(tmp_path)
    assert (source.n_tokens, source.d_in) == x.shape
    some = np.array([0, 1, 999, 1000, 5999, 6000, 9999])
    assert np.array_equal(source.rows(some).numpy(), x[some])
    assert np.array_equal(source.rows(np.arange(len(x))).numpy(), x)
    assert source.name_of(6001) == "row 1 of b.parquet"


def test_of_several_columns_the_one_named_like_the_tensor_is_read(tmp_path: Path) -> None:
    x = rows(20, 4)
    table = pa.table({"x": pa.array(rows(20, 6).tolist()), "activations": pa.array(x.tolist(), pa.list_(pa.float32()))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert np.array_equal(shards(tmp_path).rows(np.arange(20)).numpy(), x)


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (lists(None, [1.0]), f"{BEGINS}its column 'x' has missing rows; remove them"),
        (lists(kind=pa.list_(pa.float32())), "contains no activations"),
        (pa.table({"y": [1.0], "z": ["a"]}), f"{BEGINS}no column contains lists of numbers; its columns: 'y' and 'z'"),
        (lists([[1.0]], kind=pa.list_(pa.list_(pa.float32()))), f"{BEGINS}no column contains lists of numbers"),
        (
            pa.table({"a": lists([1.0])["x"], "b": lists([1.0])["x"]}),
            f"{BEGINS}several columns are lists of numbers ('a' and 'b'); rename the one to read to `activations`",
        ),
    ],
)
def test_a_table_without_exactly_one_complete_column_of_lists_of_numbers_is_refused(
    table: pa.Table, reason: str, tmp_path: Path
) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    assert problem(tmp_path).startswith(f"{tmp_path / 'a.parquet'} {reason}")


@pytest.mark.parametrize(
    "table",
    [lists([1.0, 2.0], [3.0], [4.0, 5.0, 6.0]), lists([1.0, 2.0], [1.0]), lists([1.0, None]), lists([1.0], None)],
    ids=str,
)
def test_lists_of_different_lengths_or_with_missing_values_fail_to_decode(table: pa.Table, tmp_path: Path) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    assert problem(tmp_path, shards).endswith("contains lists of different lengths, or missing values")


def test_decoding_a_damaged_page_raises_an_error(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(lists(*rows(1000, 8).tolist()), file, use_dictionary=False, row_group_size=500)
    content = bytearray(file.read_bytes())
    second = pq.read_metadata(file).row_group(1).column(0).data_page_offset
    content[second : second + 200] = bytes(200)
    file.write_bytes(content)
    assert problem(tmp_path, shards).startswith(f"{file} cannot be decoded")


def test_a_data_set_too_large_for_the_temporary_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(lists(*rows(1000, 8).tolist()), tmp_path / "a.parquet")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 1000))
    assert "set TMPDIR to a folder with more space, or store the rows as safetensors" in problem(tmp_path, shards)


def test_if_pyarrow_is_missing_the_error_shows_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(lists([1.0]), tmp_path / "a.parquet")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert problem(tmp_path).endswith("Parquet needs pyarrow: pip install 'sae-tui[parquet]'")


@pytest.mark.parametrize("content", [b"x" * 100, b"PAR1" + bytes(100) + b"PAR1"])
def test_a_file_in_another_format_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    assert problem(tmp_path).endswith("it is damaged, or not a Parquet file; copy it again")


@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_damaged_file_never_yields_negative_sizes(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.parquet"
    pq.write_table(lists([1.0, 2.0], [3.0, 4.0]), file)
    content = bytearray(file.read_bytes())
    content[-1 - place % (len(content) - 1)] = byte
    file.write_bytes(content)
    try:
        (counted,) = read_rows(file)
    except NotRowsError:
        return
    assert min(counted.n_tokens, counted.d_in) >= 0

"""Tests that files written by torch.save can be read as shards, unless they contain code or lack rows."""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.shard_files import BEGINS, problem

from trainer.activations.foreign import read_rows
from trainer.activations.shards import Shards
from trainer.contract.settings.rows import NotRowsError


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def saved(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_equal_those_returned_by_torch_load(dtype: torch.dtype, tmp_path: Path) -> None:
    first = {"token_ids": torch.arange(30), "activations": rows(30, 8, dtype=dtype), "hook": "resid", "layer": 3}
    torch.save(first, tmp_path / "a.pt")
    torch.save(rows(4, 5, 8, dtype=dtype), tmp_path / "b.pth")
    loaded = [torch.load(file, weights_only=True) for file in (tmp_path / "a.pt", tmp_path / "b.pth")]
    read = Shards(path=str(tmp_path)).rows(np.arange(50))
    assert read.dtype == dtype
    assert torch.equal(read, torch.cat([loaded[0]["activations"], loaded[1].reshape(-1, 8)]))


@pytest.mark.parametrize("protocol", [4, 5])
def test_a_pickle_that_torch_can_read_only_by_running_code_is_refused(protocol: int, tmp_path: Path) -> None:
    torch.save({"activations": rows(30, 8), "hook": "resid"}, tmp_path / "a.pt", pickle_protocol=protocol)
    assert "damaged, or contains more than tensors; save it again with torch.save(" in problem(tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        rows(100, 8)[10:20],
        rows(100, 8)[10:11, None],
        torch.nn.Parameter(rows(10, 8)),
        collections.OrderedDict(activations=rows(10, 8), other={"x": [rows(3), (1, 2.5, None, True)]}),
        {"shape": rows(3, 4).shape, "dtype": torch.float32, 7: 8, "activations": rows(10, 8)},
    ],
    ids=["slice", "row", "parameter", "ordered", "other values"],
)
def test_views_and_dicts_that_torch_loads_without_running_code_are_read(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pt")
    expected = (value["activations"] if isinstance(value, dict) else value).detach()
    assert torch.equal(Shards(path=str(tmp_path)).rows(np.arange(expected.numel() // 8)), expected.reshape(-1, 8))


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (torch.ones(3, 4, dtype=torch.int64), "stores int64; "),
        (rows(12), f"{BEGINS}its shape is [12]; reshape it to [-1, d_in]"),
        (rows(0, 4), "contains no activations"),
        (rows(4, 3).T, f"{BEGINS}its tensor is not contiguous; save it again with torch.save("),
        (rows(1, 3).expand(5, 3), f"{BEGINS}its tensor is not contiguous"),
        (
            {"x": rows(3, 4), "y": rows(2)},
            f"{BEGINS}it contains no tensor `activations`, but 'x' [3, 4] and 'y' [2]; rename",
        ),
        ({"activations": [rows(3, 4)]}, f"{BEGINS}it contains no tensor; save the rows as `activations`"),
        ([rows(3, 4)], f"{BEGINS}it contains no tensor"),
        ("a text", f"{BEGINS}it contains no tensor"),
        (argparse.Namespace(x=rows(3, 4)), f"{BEGINS}it can only be read by running code (argparse.Namespace)"),
        ({"activations": np.zeros((2, 3))}, f"{BEGINS}it can only be read by running code (numpy"),
        (rows(3, 4).to_sparse(), f"{BEGINS}its tensor is not contiguous"),
    ],
)
def test_a_file_without_rows_or_with_code_is_refused(value: object, reason: str, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "a.pt")
    assert problem(tmp_path).startswith(f"{tmp_path / 'a.pt'} {reason}")


class Evil:
    """An object whose pickle creates a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._file), "w")


def test_code_in_a_file_is_never_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"activations": rows(3, 4), "x": Evil(trace)}, tmp_path / "a.pt")
    assert "only be read by running code (io.open); save it again" in problem(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "content",
    [saved(rows(3, 4), _use_new_zipfile_serialization=False), pickle.dumps([1]), saved(rows(3, 4))[:-30]],
    # Without explicit ids, pytest would name the cases by their bytes, which differ between processes.
    ids=["torch before 1.6", "a pickle", "cut short"],
)
def test_a_file_in_another_format_is_refused(content: bytes, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    is_old = "1.6" in request.node.name
    old = "it is in the format of torch.save before 1.6; load it with torch and save it again"
    reason = old if is_old else "it is damaged, or was not written by torch.save; save it again"
    assert problem(tmp_path).startswith(f"{tmp_path / 'a.pt'} {BEGINS}{reason}")


def packed(members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def members_of(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


REAL = members_of(saved(rows(3, 4)))
(DATA,) = (name for name in REAL if name.endswith("/data/0"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (packed({"a.txt": b"x"}), "it is a zip file that torch.save did not write"),
        (packed(REAL, zipfile.ZIP_DEFLATED), "it is compressed"),
        (packed(REAL | {DATA: b"short"}), "its tensor is larger than the file"),
        (packed({name: x for name, x in REAL.items() if name != DATA}), "it is damaged, or contains more than tensors"),
        (
            packed({name: b"big" if "byteorder" in name else x for name, x in REAL.items()}),
            "its numbers are big-endian",
        ),
        (
            packed({name: x[:9] if "pkl" in name else x for name, x in REAL.items()}),
            "it is damaged, or contains more than tensors",
        ),
        (packed({"a/data.pkl": bytes(10_000_001)}, zipfile.ZIP_DEFLATED), "it contains more than tensors"),
    ],
    ids=["no pickle", "compressed", "short", "no numbers", "big-endian", "damaged pickle", "large pickle"],
)
def test_a_damaged_zip_archive_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    assert problem(tmp_path).startswith(f"{tmp_path / 'a.pt'} {BEGINS}{reason}")


@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_a_damaged_file_never_yields_negative_sizes(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    content = bytearray(saved({"activations": rows(3, 4)}))
    content[place % len(content)] = byte
    file = tmp_path_factory.getbasetemp() / "damaged.pt"
    file.write_bytes(content)
    try:
        (there,) = read_rows(file)
    except (NotRowsError, OSError):
        return
    assert min(there.offset, there.n_tokens, there.d_in) >= 0

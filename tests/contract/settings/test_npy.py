"""Tests that NumPy arrays can be read as shards, and that any other .npy file is rejected with a one-sentence error."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shard_files import rows

from trainer.activations.shards import Shards
from trainer.contract.errors import JobFileError
from trainer.contract.settings.npy import read_npy
from trainer.contract.settings.rows import NotRowsError
from trainer.contract.settings.shards import inspect_shards


def saved(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_the_arrays_in_a_folder_are_read_back_unchanged(tmp_path: Path) -> None:
    first, second = rows(30, 8), rows(4, 5, 8, dtype=np.float16)
    np.save(tmp_path / "a.npy", first)
    np.save(tmp_path / "b.npy", second)
    data = inspect_shards(tmp_path)
    assert [(shard.n_tokens, shard.d_in, shard.dtype) for shard in data.shards] == [(30, 8, "F32"), (20, 8, "F16")]
    source = Shards(path=str(tmp_path))
    read = source.rows(np.arange(50)).numpy()
    np.testing.assert_array_equal(read, np.concatenate([first, second.reshape(20, 8).astype(np.float32)]))
    np.testing.assert_array_equal(source.rows(np.array([31])).numpy()[0], second[0, 1])


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_every_version_of_the_format_is_read(version: tuple[int, int], tmp_path: Path) -> None:
    with (tmp_path / "a.npy").open("wb") as stream:
        np.lib.format.write_array(stream, rows(3, 4), version=version)
    there = read_npy(tmp_path / "a.npy")
    assert (there.n_tokens, there.d_in, there.dtype) == (3, 4, "F32")
    assert there.offset == (tmp_path / "a.npy").stat().st_size - 3 * 4 * 4


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (saved(np.arange(12).reshape(3, 4)), "stores <i8; activations must be float16, bfloat16, float32 or float64; "),
        (saved(rows(3, 4).astype(">f4")), "stores >f4; "),
        (saved(np.asfortranarray(rows(3, 4))), "is not an array of rows [n_tokens, d_in]: it is in Fortran order"),
        (saved(rows(12)), "is not an array of rows [n_tokens, d_in]: its shape is [12]; reshape it to [-1, d_in]"),
        (saved(rows(0, 4)), "contains no activations"),
        (saved(rows(3, 4))[:-1], "is truncated; copy it again"),
        (saved(rows(3, 4))[:20], "is not an array of rows [n_tokens, d_in]: its header is corrupt"),
        (b"PK\3\4", "is not an array of rows [n_tokens, d_in]: it has no NumPy header"),
        (b"", "contains no activations"),
    ],
)
def test_a_file_without_valid_rows_is_refused_in_one_sentence(content: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    file.write_bytes(content)
    with pytest.raises(JobFileError) as caught:
        inspect_shards(tmp_path)
    (problem,) = caught.value.problems
    assert (problem.path, problem.message.startswith(f"{file} {reason}")) == ("data.path", True), problem


@given(place=st.integers(0, 127), byte=st.integers(0, 255))
def test_a_damaged_header_is_either_refused_or_read_as_non_negative_sizes(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    content = bytearray(saved(rows(3, 4)))
    content[place] = byte
    file = tmp_path_factory.getbasetemp() / "damaged.npy"
    file.write_bytes(content)
    try:
        there = read_npy(file)
    except NotRowsError:
        return
    assert min(there.offset, there.n_tokens, there.d_in) >= 0


def test_the_error_for_an_archive_of_arrays_names_the_fix(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", activations=rows(30, 8))
    with pytest.raises(JobFileError, match=r"a \.npz file is an archive of arrays; save its rows as \.npy"):
        inspect_shards(tmp_path)

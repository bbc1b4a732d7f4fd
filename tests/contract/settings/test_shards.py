"""Tests that each kind of invalid activation file produces a one-sentence error that names the setting."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from trainer.contract.errors import JobFileError
from trainer.contract.json_file import read_json
from trainer.contract.settings import shards
from trainer.contract.settings.shards import inspect_shards, same_shards

WriteShard = Callable[..., Path]


def problem(path: str | Path) -> str:
    """Return the error message for a refused path."""
    with pytest.raises(JobFileError) as caught:
        inspect_shards(path)
    (refusal,) = caught.value.problems
    assert refusal.path == "data.path"
    assert "\n" not in refusal.message
    return refusal.message


def with_header(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def test_the_shards_in_a_folder_are_read_in_order_of_their_names(write_shard: WriteShard) -> None:
    write_shard(30, file="b.safetensors", dtype="F16")
    folder = write_shard(20, file="a.safetensors", dtype="BF16")
    data = inspect_shards(folder)
    assert [(shard.file.name, shard.n_tokens, shard.dtype) for shard in data.shards] == [
        ("a.safetensors", 20, "BF16"),
        ("b.safetensors", 30, "F16"),
    ]
    assert (data.d_in, data.n_tokens) == (8, 50)


def test_the_offset_of_a_shard_is_the_start_of_its_rows(tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    file = tmp_path / "a.safetensors"
    save_file({"a_first": np.zeros(5, np.float32), "activations": x}, file, metadata={"model": "mini"})
    (shard,) = inspect_shards(file).shards
    read = np.fromfile(file, np.float32, count=12, offset=shard.offset).reshape(shard.n_tokens, shard.d_in)
    np.testing.assert_array_equal(read, x)


def test_the_sample_data_is_valid() -> None:
    data = inspect_shards(Path(__file__).parents[3] / "data" / "sample")
    assert (data.n_tokens, data.d_in) == (16_384, 384)


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    assert (
        problem(missing)
        == f"there is nothing at {missing}; give a folder of .safetensors, .npy, .pt, .arrow or .parquet shards"
    )


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    assert problem(tmp_path) == f"there are no .safetensors, .npy, .pt, .arrow or .parquet shards in {tmp_path}"


def test_the_error_for_a_folder_of_hooks_names_the_subfolders(write_shard: WriteShard, tmp_path: Path) -> None:
    write_shard().rename(tmp_path / "blocks.3")
    write_shard().rename(tmp_path / "blocks.1")
    (tmp_path / "empty").mkdir()
    assert problem(tmp_path).endswith(f" in {tmp_path}; give one of its subfolders: blocks.1 and blocks.3")


@pytest.mark.parametrize("path", ["~nosuchuser/acts", "a\0b"], ids=["nobody", "nul"])
def test_an_impossible_path_is_refused(path: str) -> None:
    assert problem(path).startswith("there is nothing at ")


def test_a_name_that_is_too_long_is_refused() -> None:
    assert problem("x" * 5000).endswith("cannot be read: File name too long")


@pytest.mark.parametrize("content", [b"short", b"\xff" * 64, b"PK\x03\x04" * 100], ids=["short", "ff", "zip"])
def test_a_file_in_another_format_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    assert problem(file) == f"{file} is not a complete safetensors file; copy it again"


def test_a_header_with_a_huge_length_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 10**12))
        stream.truncate(2 * 10**12)  # sparse file: the long header is present, filled with zeros
    assert "is not a complete safetensors file" in problem(file)


@pytest.mark.parametrize(
    "tensor",
    [
        {"dtype": "F32", "shape": [-5, -2], "data_offsets": [0, 40]},
        {"dtype": "F32", "shape": ["5", 2], "data_offsets": [0, 40]},
        {"dtype": "F32", "shape": "52", "data_offsets": [0, 40]},
        {"dtype": "F32", "shape": [5, 2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [5, 2], "data_offsets": None},
        {"dtype": "F32", "shape": [5, 2]},
        {"dtype": ["F32"], "shape": [5, 2], "data_offsets": [0, 40]},
        "a text",
        None,
    ],
)
def test_a_header_without_a_matrix_is_refused(tmp_path: Path, tensor: object) -> None:
    file = with_header(tmp_path / "a.safetensors", {"activations": tensor}, bytes(40))
    assert problem(file).endswith("is not a complete safetensors file; copy it again")


@pytest.mark.parametrize(
    "header", [[], 5, b"{", b"\xff\xfe", b"[" * 100_000], ids=["list", "number", "cut", "utf8", "deep"]
)
def test_a_header_that_is_not_a_table_is_refused(tmp_path: Path, header: object) -> None:
    assert "is not a complete safetensors file" in problem(with_header(tmp_path / "a.safetensors", header))


def test_the_error_for_a_one_dimensional_tensor_names_the_fix(write_shard: WriteShard) -> None:
    save_file({"activations": np.zeros(10, np.float32)}, (folder := write_shard()) / "a.safetensors")
    assert problem(folder).endswith("[n_tokens, d_in]: its shape is [10]; reshape it to [-1, d_in]")


def test_an_ambiguous_tensor_is_refused(tmp_path: Path) -> None:
    save_file({"x": np.zeros((4, 3), np.float32), "y": np.zeros((5, 2), np.float32)}, tmp_path / "a.safetensors")
    listed = "it contains no tensor `activations`, but 'x' [4, 3] and 'y' [5, 2]; rename the one to read"
    assert problem(tmp_path).endswith(listed)


@pytest.mark.parametrize("dtype", ["I8", "F8_E4M3"])
def test_an_unsupported_dtype_is_refused(write_shard: WriteShard, dtype: str) -> None:
    assert problem(write_shard(dtype=dtype)).endswith(
        f"stores {dtype}; activations must be float16, bfloat16, float32 or float64; save them as float32"
    )


def test_a_truncated_file_is_refused(write_shard: WriteShard) -> None:
    file = write_shard() / "a.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert problem(file.parent) == f"{file} is truncated; copy it again"


def test_a_shape_that_needs_more_bytes_than_the_file_has_is_refused(tmp_path: Path) -> None:
    header = {"activations": {"dtype": "F32", "shape": [5, 2], "data_offsets": [0, 36]}}
    assert problem(with_header(tmp_path / "a.safetensors", header, bytes(40))).endswith("is truncated; copy it again")


@pytest.mark.parametrize("shape", [(0, 8), (8, 0)])
def test_a_file_without_rows_is_refused(write_shard: WriteShard, shape: tuple[int, int]) -> None:
    assert problem(write_shard(*shape)).endswith("contains no activations; extract them again")


def test_hidden_and_empty_files_are_skipped_and_named(write_shard: WriteShard) -> None:
    folder = write_shard(5, 8)
    write_shard(0, 8, file="b.safetensors")
    (folder / "c.safetensors").touch()
    for name in ("._a.safetensors", ".DS_Store"):
        (folder / name).write_bytes(b"Mac OS X")
    found = inspect_shards(folder)
    assert (found.n_tokens, len(found.shards)) == (5, 1)
    assert found.notes == (
        f"skipped 2 files in {folder} (hidden): '.DS_Store' and '._a.safetensors'",
        f"skipped 2 files in {folder} (without a row): 'b.safetensors' and 'c.safetensors'",
    )


def test_a_folders_metadata_is_read_once_for_all_its_shards(
    write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        folder = write_shard(5, 8, file=f"{name}.safetensors")
    (folder / "meta.json").write_text('{"shards": {"a.safetensors": "0", "b.safetensors": "1", "c.safetensors": 2}}')
    read: list[Path] = []

    def counted(file: Path, kind: type) -> object:
        read.append(file)
        return read_json(file, kind)

    monkeypatch.setattr(shards, "read_json", counted)
    assert same_shards([inspect_shards(folder)]) is None
    assert read == [folder / "meta.json"]


def test_a_git_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
    pointer = "it is a git-lfs pointer, not the file; run `git lfs pull`"
    assert problem(tmp_path) == f"{file} cannot be read: {pointer}"


def test_shards_with_different_widths_are_refused(write_shard: WriteShard) -> None:
    write_shard(d_in=8, file="a.safetensors")
    message = problem(write_shard(d_in=16, file="b.safetensors"))
    assert message == "b.safetensors has d_in 16, but a.safetensors has 8; all shards must agree"


def test_a_folder_with_a_name_like_a_shard_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").mkdir()
    assert problem(tmp_path).endswith("a.safetensors cannot be read: it is not a plain file")


def test_a_folder_without_read_permission_is_refused(
    open_folder: Path, ordinary_user: Callable[[], AbstractContextManager[None]]
) -> None:
    (open_folder / "closed" / "acts").mkdir(parents=True)
    (open_folder / "closed").chmod(0)
    with ordinary_user():
        message = problem(open_folder / "closed" / "acts")
    (open_folder / "closed").chmod(0o700)
    assert message.endswith("cannot be read: Permission denied")


def test_the_caller_can_choose_the_setting_that_the_error_names(tmp_path: Path) -> None:
    with pytest.raises(JobFileError) as caught:
        inspect_shards(tmp_path, field="--data")
    assert caught.value.problems[0].path == "--data"


def test_unused_tensors_are_ignored(tmp_path: Path) -> None:
    tensors: dict[str, Any] = {"activations": np.zeros((2, 3), np.float16), "tokens": np.zeros(2, np.int64)}
    save_file(tensors, tmp_path / "a.safetensors")
    assert inspect_shards(tmp_path).d_in == 3


def test_a_pipe_among_the_shards_is_refused_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    assert problem(tmp_path).endswith("a.safetensors cannot be read: it is not a plain file")

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trainer.activations.shards import Shards
from trainer.contract.errors import JobFileError


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_are_read_back_exactly_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(50, 7).to(dtype)
    # Another tensor comes first in the file, so the rows do not start at data offset 0.
    save_file({"aaa": torch.ones(3, dtype=torch.int64), "activations": x}, tmp_path / "x.safetensors")
    source = Shards(path=str(tmp_path))
    assert (source.n_tokens, source.d_in) == (50, 7)
    rows = source.rows(np.array([49, 0, 17]))
    assert rows.dtype == dtype
    assert torch.equal(rows, x[[0, 17, 49]])
    source.read_by_all_threads()
    assert torch.equal(source.rows(np.array([49, 0, 17])), rows)


def test_rows_are_numbered_across_shards(tmp_path: Path) -> None:
    x = torch.arange(30.0).reshape(30, 1).expand(30, 4).contiguous()
    for number, (first, last) in enumerate([(0, 4), (4, 5), (5, 30)]):
        save_file({"activations": x[first:last].clone()}, tmp_path / f"{number}.safetensors")
    source = Shards(path=str(tmp_path))
    rows = source.rows(np.array([29, 4, 3, 5, 0]))
    assert rows[:, 0].tolist() == [0, 3, 4, 5, 29]
    source.read_by_all_threads()
    assert torch.equal(source.rows(np.array([29, 4, 3, 5, 0])), rows)


def test_shards_with_two_dtypes_are_read_in_a_dtype_that_can_represent_both(tmp_path: Path) -> None:
    x = torch.randn(30, 4)
    save_file({"activations": x[:10].to(torch.bfloat16)}, tmp_path / "0.safetensors")
    save_file({"activations": x[10:].half()}, tmp_path / "1.safetensors")
    source = Shards(path=str(tmp_path))
    rows = source.rows(np.arange(30))
    assert rows.dtype == torch.float32
    source.read_by_all_threads()
    assert torch.equal(source.rows(np.arange(30)), rows)
    assert torch.equal(rows, torch.cat([x[:10].to(torch.bfloat16).float(), x[10:].half().float()]))


def test_rows_that_were_shuffled_when_stored_can_be_read_in_contiguous_runs(tmp_path: Path) -> None:
    save_file({"activations": torch.randn(30, 4)}, tmp_path / "0.safetensors")
    assert Shards(path=str(tmp_path)).run == 1
    (tmp_path / "meta.json").write_text('{"shuffled": true}')
    assert Shards(path=str(tmp_path)).run > 1
    (tmp_path / "meta.json").write_text('{"shuffled": "no"}')
    assert Shards(path=str(tmp_path)).run == 1


@pytest.mark.slow
def test_data_larger_than_memory_is_read_with_little_memory(tmp_path: Path) -> None:
    n_rows, d_in = 20_000_000, 1024
    header = {"activations": {"dtype": "F32", "shape": [n_rows, d_in], "data_offsets": [0, 4 * n_rows * d_in]}}
    text = json.dumps(header).encode().ljust(512)
    with (tmp_path / "x.safetensors").open("wb") as file:
        # Create a sparse 76 GiB file that takes almost no disk space.
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 * n_rows * d_in)
        file.seek(-4, os.SEEK_END)
        file.write(struct.pack("<f", 2.0))
    reading = f"""
import resource
from trainer.activations.shards import Shards
from trainer.activations.training_data import IndexedData
from trainer.parallel.group import Group
resource.setrlimit(resource.RLIMIT_DATA, (2**30, 2**30))
source = Shards(path={str(tmp_path)!r})
data = IndexedData(source, 5000, 0, Group())
assert data.of_hook(0).sample(0)[0].shape == (32_768, {d_in})
for step in range(20):
    assert data.read(step * 4096, 4096).x.shape == (4096, {d_in})
import numpy as np
assert source.rows(np.array([{n_rows - 1}]))[0, -1] == 2
try:
    bytearray(2**30)
except MemoryError:
    print("the limit holds")
"""
    done = subprocess.run([sys.executable, "-c", reading], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("the limit holds\n", "")


def write_targets(folder: Path, sizes: list[int]) -> tuple[str, torch.Tensor]:
    """Write targets [n, 4] whose first column is the row number, and return the folder and the tensor."""
    y = torch.arange(float(sum(sizes)))[:, None] + torch.arange(4.0) / 8
    folder.mkdir()
    for number, part in enumerate(y.split(sizes)):
        save_file({"activations": part.clone()}, folder / f"{number}.safetensors")
    return str(folder), y


def test_without_targets_the_input_is_its_own_target(activations: Path) -> None:
    source = Shards(path=str(activations))
    x, y = source.pairs(np.array([5, 3]))
    assert source.d_out is None
    assert y is x
    assert torch.equal(x, source.rows(np.array([3, 5])))


def test_targets_can_have_different_shard_boundaries_from_the_inputs(activations: Path, tmp_path: Path) -> None:
    target_path, targets = write_targets(tmp_path / "targets", [1, 2000, 999])
    source = Shards(path=str(activations), target_path=target_path)
    assert (source.d_in, source.d_out, source.n_tokens) == (16, 4, 3000)
    indices = np.random.default_rng(0).permutation(3000)[:500]
    x, y = source.pairs(indices)
    assert torch.equal(x, source.rows(indices))
    assert torch.equal(y, targets[np.sort(indices)])


def test_the_error_for_a_bad_target_names_the_row_in_both_files(activations: Path, tmp_path: Path) -> None:
    target_path, targets = write_targets(tmp_path / "targets", [100, 2900])
    broken = targets[100:].clone()
    broken[1700] = torch.nan
    save_file({"activations": broken}, tmp_path / "targets" / "1.safetensors")
    source = Shards(path=str(activations), target_path=target_path)
    row = source.first_not_finite(np.arange(2999, -1, -1))
    assert row == 1800
    assert source.name_of(row) == "row 100 of b.safetensors or its target, row 1700 of 1.safetensors"
    assert source.place == f"{activations} with targets in {target_path}"


def test_fewer_targets_than_rows_are_refused(activations: Path, tmp_path: Path) -> None:
    target_path, _ = write_targets(tmp_path / "targets", [2999])
    with pytest.raises(JobFileError, match=r"^data\.target_path: .* has 2,999 rows, but .* has 3,000"):
        Shards(path=str(activations), target_path=target_path)


def test_metadata_is_read_and_a_malformed_metadata_file_is_ignored(activations: Path) -> None:
    (activations / "meta.json").write_text(json.dumps({"hook_name": "blocks.3"}))
    assert Shards(path=str(activations)).meta == {"hook_name": "blocks.3"}
    (activations / "meta.json").write_text("{")
    assert Shards(path=str(activations)).meta == {}


def test_the_error_for_a_missing_folder_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"data\.path: there is nothing at"):
        Shards(path=str(tmp_path / "gone"))


def test_more_shards_than_a_process_may_open_are_read_or_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        np.save(tmp_path / f"{number:03}.npy", np.full((1, 2), number, np.float32))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        assert Shards(path=str(tmp_path)).rows(np.arange(300))[:, 0].tolist() == [*range(300)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
        with pytest.raises(JobFileError, match=r"^data\.path: the 300 shards of .* Too many open files; .*`ulimit -n"):
            Shards(path=str(tmp_path))
    finally:
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

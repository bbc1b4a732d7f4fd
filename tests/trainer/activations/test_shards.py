from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trainer.activations.shards import Shards
from trainer.contract.problems import JobFileError


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rows_come_back_exactly_as_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(50, 7).to(dtype)
    # A tensor before it, so that the rows do not begin where the data does.
    save_file({"aaa": torch.ones(3, dtype=torch.int64), "activations": x}, tmp_path / "x.safetensors")
    source = Shards(path=str(tmp_path))
    assert (source.n_tokens, source.d_in) == (50, 7)
    rows = source.rows(np.array([49, 0, 17]))
    assert rows.dtype == dtype
    assert torch.equal(rows, x[[0, 17, 49]])


def test_rows_of_several_shards_are_numbered_through(tmp_path: Path) -> None:
    x = torch.arange(30.0).reshape(30, 1).expand(30, 4).contiguous()
    for number, (first, last) in enumerate([(0, 4), (4, 5), (5, 30)]):
        save_file({"activations": x[first:last].clone()}, tmp_path / f"{number}.safetensors")
    rows = Shards(path=str(tmp_path)).rows(np.array([29, 4, 3, 5, 0]))
    assert rows[:, 0].tolist() == [0, 3, 4, 5, 29]


def test_a_sample_comes_from_all_shards_without_repeats(activations: Path) -> None:
    source = Shards(path=str(activations))
    sample = source.sample(3000, seed=0)
    assert sample.dtype == torch.float32
    assert torch.equal(sample, source.rows(np.arange(3000)).float())
    assert torch.equal(source.sample(100, seed=1), source.sample(100, seed=1))
    assert len(source.sample(10_000, seed=0)) == 3000


def test_the_note_beside_the_shards_is_read_and_a_broken_one_ignored(activations: Path) -> None:
    (activations / "meta.json").write_text(json.dumps({"hook_name": "blocks.3"}))
    assert Shards(path=str(activations)).meta == {"hook_name": "blocks.3"}
    (activations / "meta.json").write_text("{")
    assert Shards(path=str(activations)).meta == {}


def test_a_missing_folder_is_told_by_the_name_of_the_setting(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"data\.path: there is nothing at"):
        Shards(path=str(tmp_path / "gone"))

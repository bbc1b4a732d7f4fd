"""Tests that shards for all hooks are shuffled in the same order and written atomically, with exact statistics."""

from __future__ import annotations

import hashlib
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.extraction.shard_writer import DimensionSums, ShardBuffer, StoredOrigin, add_sums


def rows(first: int, n: int) -> tuple[list[Tensor], StoredOrigin]:
    """Return rows from two hooks with 3 and 2 dimensions. Each value is the row number, negated for the second hook."""
    numbers = torch.arange(first, first + n, dtype=torch.float32)[:, None]
    ids = numbers[:, 0].int()
    return [numbers.expand(n, 3).clone(), -numbers.expand(n, 2).clone()], StoredOrigin(
        ids, ids + 1000, ids // 10, ids.long()
    )


@pytest.fixture
def blocks(tmp_path: Path) -> ShardBuffer:
    return ShardBuffer([tmp_path / "a", tmp_path / "b"], shard_rows=8, seed=3)


def test_each_shard_contains_the_next_rows_in_the_same_order_for_all_hooks(blocks: ShardBuffer, tmp_path: Path) -> None:
    for first, n in ((0, 5), (5, 0), (5, 15)):
        blocks.add(*rows(first, n))
    for number in range(2):
        assert blocks.is_full
        blocks.write(number)
        a, b = (load_file(tmp_path / hook / f"shard-0000{number}.safetensors") for hook in "ab")
        ids = a["token_ids"].tolist()
        assert sorted(ids) == list(range(8 * number, 8 * number + 8)) != ids
        assert a["activations"].tolist() == [[one] * 3 for one in ids]
        assert b["activations"].tolist() == [[-one] * 2 for one in ids]
        for tensors in (a, b):
            assert (tensors["positions"] - 1000).tolist() == tensors["token_ids"].tolist() == ids
            assert tensors["document"].tolist() == [one // 10 for one in ids]
            assert [tensors[name].dtype for name in StoredOrigin._fields] == [torch.int32] * 3 + [torch.int64]
            assert tensors["place"].tolist() == ids
    assert (blocks.is_full, blocks.n_waiting) == (False, 4)
    assert [shard.n_tokens for shard, _ in blocks.write(2)] == [4, 4]
    assert blocks.n_waiting == 0


def test_the_seed_determines_the_order_and_the_bytes(tmp_path: Path) -> None:
    digests = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        blocks = ShardBuffer([tmp_path / name, tmp_path / f"{name}2"], shard_rows=8, seed=seed)
        blocks.add(*rows(0, 8))
        digests.append(blocks.write(0)[0][0].sha256)
    assert digests[0] == digests[1] != digests[2]


def test_writing_a_shard_records_its_hash_and_leaves_no_other_file(blocks: ShardBuffer, tmp_path: Path) -> None:
    blocks.add(*rows(0, 8))
    for (shard, _), hook in zip(blocks.write(0), "ab", strict=True):
        file = tmp_path / hook / shard.name
        assert shard.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        assert [one.name for one in file.parent.iterdir()] == [shard.name]
        assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_shard_has_the_same_bytes_as_one_written_by_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    blocks, n = ShardBuffer([tmp_path], shard_rows=12_000, seed=0), 12_000
    x = torch.randn(n, 301, generator=torch.Generator().manual_seed(0)).to(dtype)
    numbers = torch.arange(n, dtype=torch.int32)
    for first in range(0, n, 5000):
        part = slice(first, first + 5000)
        blocks.add([x[part]], StoredOrigin(numbers[part], numbers[part] + 1, numbers[part] // 9, numbers[part].long()))
    ((shard, _),) = blocks.write(0)
    file = tmp_path / shard.name
    stored = load_file(file)
    assert file.read_bytes() == save(stored)
    assert torch.equal(stored["activations"], x[stored["token_ids"].long()])


def test_only_selected_rows_are_stored(blocks: ShardBuffer, tmp_path: Path) -> None:
    some, origin = rows(0, 20)
    at = torch.tensor([1, 2, 3, 5, 8, 13, 18, 19, 0, 4])
    blocks.add(some, StoredOrigin(*(one[at] for one in origin)), at)
    blocks.write(0)
    for hook, sign in (("a", 1), ("b", -1)):
        stored = load_file(tmp_path / hook / "shard-00000.safetensors")
        assert (sign * stored["activations"][:, 0]).tolist() == stored["token_ids"].tolist()
        assert sorted(stored["token_ids"].tolist()) == [1, 2, 3, 5, 8, 13, 18, 19]
    assert blocks.n_waiting == 2


def test_statistics_equal_those_computed_in_float64_over_all_shards(tmp_path: Path) -> None:
    x = torch.randn(9000, 3, generator=torch.Generator().manual_seed(0)) * 5 + torch.tensor([100.0, 0, -7])
    blocks = ShardBuffer([tmp_path], shard_rows=5000, seed=0)
    blocks.add(
        [x.to(torch.bfloat16)],
        StoredOrigin(*(torch.zeros(9000, dtype=torch.int32),) * 3, torch.zeros(9000, dtype=torch.int64)),
    )
    together: DimensionSums | None = None
    for number in range(2):
        together = add_sums(together, blocks.write(number)[0][1])
    assert together is not None
    stored = x.to(torch.bfloat16).double().numpy()
    assert together.n == 9000
    np.testing.assert_allclose(together.mean, stored.mean(0), rtol=1e-12)
    np.testing.assert_allclose(together.variance, stored.var(0).sum(), rtol=1e-9)


def test_the_computed_bytes_per_row_equal_the_row_size_on_disk(blocks: ShardBuffer, tmp_path: Path) -> None:
    some, origin = rows(0, 8)
    some[1] = some[1].half()
    blocks.add(some, origin)
    blocks.write(0)
    tensors = [load_file(file) for file in tmp_path.glob("*/*.safetensors")]
    assert sum(one.nbytes for of_file in tensors for one in of_file.values()) == 8 * blocks.row_bytes(some)


@pytest.fixture
def small_files() -> Iterator[int]:
    """Limit the file size to simulate a full disk, and yield the limit in bytes."""
    limit = 4096
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_produces_a_one_sentence_error_and_leaves_no_shard(tmp_path: Path, small_files) -> None:
    blocks = ShardBuffer([tmp_path / "a", tmp_path / "b"], shard_rows=small_files, seed=0)
    blocks.add(*rows(0, small_files))
    with pytest.raises(UserError, match=r"^.*/a/shard-00000.safetensors could not be written: [^\n]* and try again$"):
        blocks.write(0)
    assert list(tmp_path.glob("a/*")) == []

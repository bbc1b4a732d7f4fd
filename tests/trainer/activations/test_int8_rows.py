"""Tests that int8 rows are within half a step of the exact rows, wherever they are decoded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainer.activations.base import IndexedSource
from trainer.activations.batches import Batches
from trainer.activations.int8_rows import decoded, encoded, noise_of
from trainer.activations.micro_batches import Cut
from trainer.activations.shards import Shards
from trainer.activations.side_by_side import SideBySide
from trainer.activations.training_data import IndexedData
from trainer.activations.transfer import Overlapped
from trainer.contract.errors import JobFileError
from trainer.contract.settings.rows import INT8, row_bytes
from trainer.measuring.inspection import inspect_data, table
from trainer.parallel.group import Group

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def rows_like_a_model(n: int, d: int, seed: int = 0) -> Tensor:
    """Return rows whose dimensions have different spreads, and means far larger than these."""
    generator = torch.Generator().manual_seed(seed)
    spread, mean = (torch.rand(d, generator=generator) * scale for scale in (3, 50))
    return torch.randn(n, d, generator=generator) * spread + mean


def store(folder: Path, x: Tensor, mean: Tensor, name: str = "0", **others: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"int8_rows": encoded(x, mean), "int8_mean": mean, **others}, folder / f"{name}.safetensors")
    return folder


def half_steps(x: Tensor, mean: Tensor) -> Tensor:
    """Return half the width of a step for each value, computed per group; bf16 scales exceed it by up to 1/128."""
    largest = [group.abs().amax(1, keepdim=True).expand_as(group) for group in (x - mean).split(64, dim=1)]
    return torch.cat(largest, dim=1) / 127 / 2 * (1 + 2**-7)


@pytest.mark.parametrize("d", [1, 63, 64, 65, 200])
def test_the_reader_in_the_docs_gives_rows_within_half_a_step(tmp_path: Path, d: int) -> None:
    x = rows_like_a_model(300, d)
    mean = x[:50].mean(0)
    # Padding, which is counted and left out because it is exactly 0.
    x[60] = 0.0
    folder = store(tmp_path / "rows", x, mean)
    assert encoded(x, mean).shape == (300, row_bytes(d, INT8)) == (300, d + 2 * -(-d // 64))
    block = (ROOT / "docs/how-to/extract.md").read_text().partition('title="read_int8.py"\n')[2].partition("```")[0]
    exec(compile(block, "extract.md", "exec"), names := {})
    read = torch.from_numpy(names["read_int8"](folder / "0.safetensors"))
    assert ((read - x).abs() <= half_steps(x, mean) + 1e-5).all()
    assert not read[60].any()
    source = Shards(path=str(folder))
    assert (source.n_tokens, source.d_in) == (300, d)
    assert torch.equal(source.rows(np.arange(300)), read)
    source.read_by_all_threads()
    assert torch.equal(source.rows(np.array([7, 299, 0])), read[[0, 7, 299]])


def test_the_expected_noise_is_the_actual_noise() -> None:
    x = rows_like_a_model(2000, 200)
    coded = encoded(x, x.mean(0))
    error = float((decoded(coded, x.mean(0)).double() - x).square().sum())
    assert noise_of(coded, 200) == pytest.approx(error, rel=0.02)


def test_rows_that_are_not_finite_remain_so_and_others_are_exact_at_extremes() -> None:
    mean = torch.full((70,), 3.0)
    x = mean.repeat(6, 1)
    x[0, 5], x[1, 69], x[2, 0] = torch.nan, torch.inf, -torch.inf
    x[4] = 0.0
    x[5, 1] = 3e38
    read = decoded(encoded(x, mean), mean)
    assert read.isfinite().all(dim=1).tolist() == [False, False, False, True, True, True]
    assert torch.equal(read[3], mean)
    torch.testing.assert_close(read[4:], x[4:], rtol=0.01, atol=0.03)


def in_any_order(rows: Tensor) -> list[list[float]]:
    return sorted(rows.tolist())


class Bus:
    """A lane to a simulated GPU that counts the bytes that cross the bus."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def pinned(self, n_bytes: int) -> Tensor:
        return torch.empty(n_bytes, dtype=torch.uint8)

    def copy(self, rows: Tensor) -> Tensor:
        self.n_bytes += rows.numel() * rows.element_size()
        return rows.clone()

    def mark(self) -> Bus:
        return self

    def synchronize(self) -> None:
        """Do nothing, because every copy is complete."""

    def meet(self, arrival: object, rows: tuple[Tensor, ...]) -> None:
        """Do nothing."""


def batches_of(source: IndexedSource, lane: Bus | None = None) -> list[list[float]]:
    """Return the rows of one epoch in any order, read in batches; the rows of several hooks are joined."""
    data = IndexedData(source, 0, 0, Group())
    batches = Batches(data, Cut(64), start=0, device=CPU, transfer=Overlapped(CPU, lane) if lane else None)
    try:
        pairs = [batches.next().hooks for _ in range(source.n_tokens // 64)]
    finally:
        batches.close()
    return in_any_order(torch.cat([torch.cat([x for x, _ in hooks], dim=1) for hooks in pairs]))


def test_training_gets_the_rows_of_mixed_and_joined_folders(tmp_path: Path) -> None:
    x = rows_like_a_model(256, 70)
    first, second = x[:128], x[128:]
    folders = {"a": store(tmp_path / "a", first, first.mean(0)), "b": store(tmp_path / "b", second, second.mean(0))}
    (tmp_path / "c").mkdir()
    save_file({"activations": second.clone()}, tmp_path / "c" / "0.safetensors")
    a, b = (Shards(path=str(folder)) for folder in folders.values())
    rows = a.rows(np.arange(128)), b.rows(np.arange(128))
    both = [str(folder) for folder in folders.values()]
    # Folders with different means, and with different dtypes.
    mixed, dtypes = Shards(path=both), Shards(path=[str(tmp_path / "a"), str(tmp_path / "c")])
    assert mixed.coded_bytes == (70 + 4 + 1, 0)
    assert dtypes.coded_bytes is None
    assert torch.equal(mixed.rows(np.arange(256)), torch.cat(rows))
    for lane in (None, Bus()):
        assert batches_of(mixed, lane) == in_any_order(torch.cat(rows))
    # Four batches, and up to four that were read ahead, crossed the bus as bytes.
    assert lane
    assert lane.n_bytes % (64 * 75) == 0
    assert 4 * 64 * 75 <= lane.n_bytes <= 8 * 64 * 75
    assert batches_of(dtypes) == in_any_order(torch.cat([rows[0], second]))
    # Two hooks: both int8, and one of them fp32.
    for sources in ([a, b], [a, Shards(path=str(tmp_path / "c"))]):
        beside = SideBySide(sources)
        assert (beside.coded_bytes is None) == (sources[1] is not b)
        assert batches_of(beside) == in_any_order(beside.rows(np.arange(128)))


def test_a_join_leaves_out_int8_rows_that_one_folder_lacks(tmp_path: Path) -> None:
    x, place = rows_like_a_model(100, 70), torch.arange(100)
    other = rows_like_a_model(100, 66, seed=1)
    store(tmp_path / "a", x, x.mean(0), place=place)
    store(tmp_path / "b", other[5:], other.mean(0), place=place[5:].clone())
    sources = [Shards(path=str(tmp_path / name)) for name in "ab"]
    joined = sources[0].joined(sources[1:])
    assert joined.coded_bytes == (70 + 4 + 66 + 4, 0)
    assert (joined.n_tokens, joined.stored_as) == (95, "int8")
    expected = torch.cat([sources[0].rows(np.arange(5, 100)), sources[1].rows(np.arange(95))], dim=1)
    assert torch.equal(joined.rows(np.arange(95)), expected)
    assert torch.equal(joined.decoded(joined.coded_pairs(np.arange(95)))[0], expected)


def test_targets_may_be_int8_too(tmp_path: Path) -> None:
    x, y = rows_like_a_model(64, 70), rows_like_a_model(64, 10, seed=1)
    folders = [store(tmp_path / "x", x, x.mean(0)), store(tmp_path / "y", y, y.mean(0))]
    source = Shards(path=str(folders[0]), target_path=str(folders[1]))
    read = source.decoded(source.coded_pairs(np.arange(64)))
    assert all(map(torch.equal, read, source.pairs(np.arange(64))))
    assert read[1].shape == (64, 10)


def test_inspect_shows_int8_rows_and_their_noise(tmp_path: Path) -> None:
    x = rows_like_a_model(256, 70)
    folder = store(tmp_path / "rows", x, x.mean(0))
    (folder / "meta.json").write_text('{"int8_noise": 0.000096}')
    told = table(inspect_data(folder))
    assert "d_in 70, INT8" in told
    assert "the rows are stored as int8, noise 9.6e-05 of their variance" in told


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"int8_mean": None}, "needs 'int8_mean', a float32 vector"),
        ({"int8_mean": torch.zeros(9)}, r"is not uint8 of shape \[n_tokens, 11\], as 'int8_mean' says"),
        ({"int8_rows": torch.zeros(5, 12, dtype=torch.int8)}, "is not uint8 of shape"),
    ],
)
def test_damaged_int8_rows_are_refused_in_one_sentence(tmp_path: Path, change: dict, words: str) -> None:
    tensors = {"int8_rows": torch.zeros(5, 12, dtype=torch.uint8), "int8_mean": torch.zeros(10)} | change
    save_file({name: one for name, one in tensors.items() if one is not None}, tmp_path / "0.safetensors")
    with pytest.raises(JobFileError, match=words):
        Shards(path=str(tmp_path))

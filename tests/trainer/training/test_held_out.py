from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.activations.base import Empty, Indices, Pair, empty_rows
from trainer.activations.micro_batches import TokenSlice
from trainer.activations.outliers import Outliers
from trainer.activations.shards import Shards
from trainer.activations.training_data import HALVES, IndexedData
from trainer.contract.planning.rows_on_gpu import MOST_KEPT_BYTES, most_kept
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group
from trainer.training.batch_size_trial import fits_everywhere
from trainer.training.held_out import HeldOut
from trainer.training.learner import Learner


class Counted(Shards):
    n_read = 0

    def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        self.n_read += len(indices)
        return super().pairs(indices, empty)


def held_out(folder: Path, times: float = 0.0) -> tuple[HeldOut, Counted]:
    source = Counted(path=str(folder))
    rows = source.rows(np.arange(1000)).float()
    data = IndexedData(source, 500, 0, Group())
    return HeldOut(data, [Outliers(rows, rows, times)], torch.device("cpu")), source


@pytest.mark.parametrize("times", [0.0, 1.2])
def test_cached_rows_are_read_once_and_equal_the_rows_without_a_cache(times: float, activations: Path) -> None:
    (read, _), (kept, source) = held_out(activations, times), held_out(activations, times)
    assert not kept.keeps
    kept.keeps = True
    for batch_size in (128, 128, 50):
        anew, same = (torch.cat([x for x, _ in one.batches(0, batch_size)]) for one in (read, kept))
        assert torch.equal(anew.float(), same.float())
        assert (len(anew) < 500) == (times > 0)
        assert all(len(x) <= batch_size and y is x for x, y in kept.batches(0, batch_size))
    assert source.n_read == 500


def test_held_out_rows_are_cached_on_a_gpu_but_not_on_a_cpu(activations: Path) -> None:
    data = IndexedData(Shards(path=str(activations)), 500, 0, Group())
    assert [HeldOut(data, [], torch.device(one)).keeps for one in ("cuda", "cpu")] == [True, False]


def test_rows_are_not_cached_if_the_device_runs_out_of_memory(
    activations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, _ = held_out(activations)
    kept.keeps = True
    move, calls = HeldOut._read, iter([True])

    def fail_once(one: HeldOut, *asked: Any) -> object:
        if next(calls, False):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return move(one, *asked)

    monkeypatch.setattr(HeldOut, "_read", fail_once)
    assert sum(len(x) for x, _ in kept.batches(0, 128)) == 500
    assert not kept.keeps


def test_rows_exceeding_the_size_limit_are_not_cached(activations: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_bytes = 500 * 16 * 4
    for most, keeps in ((n_bytes, True), (n_bytes - 1, False)):
        monkeypatch.setattr("trainer.training.held_out.MOST_KEPT_BYTES", most)
        kept, _ = held_out(activations)
        kept.keeps = True
        assert sum(len(x) for x, _ in kept.batches(0, 128)) == 500
        assert kept.keeps == keeps


def test_a_micro_batch_must_fit_in_memory_alongside_the_cached_rows(make_job: Callable[..., JobConfig]) -> None:
    parallel, x = Parallel(torch.device("cpu")), torch.randn(100, 16)
    learner = Learner(make_job(), 16, None, parallel)
    learner.initialise(x, x)
    fits = [fits_everywhere([learner], parallel, (x, x), TokenSlice(0, 64, 64), 1, kept) for kept in (0, 2**20, 2**60)]
    assert fits == [True, True, False]
    assert most_kept(32_768, 1, 2304) == 4 * 32_768 * 2304
    assert most_kept(32_768, 4, 10**6) == MOST_KEPT_BYTES


def test_non_finite_rows_are_excluded_and_counted_each_time_they_are_read(activations: Path) -> None:
    rows = load_file(activations / "a.safetensors")["activations"]
    rows[::2, 0] = torch.nan
    save_file({"activations": rows}, activations / "a.safetensors")
    read, _ = held_out(activations)
    for _ in range(2):
        x = torch.cat([x for half in HALVES for x, _ in read.batches(0, 128, half)])
        assert x.isfinite().all()
        assert read.left_out(0) == (0, 500 - len(x), 0, 500)
    assert 0 < len(x) < 500

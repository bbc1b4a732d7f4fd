"""Tests that sources are mixed in exact proportion to their weights, and that a run can resume at any row position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from trainer.activations.mixture import MixedOrder, MixedSplit, apportion
from trainer.activations.shards import Shards
from trainer.contract.errors import JobFileError
from trainer.contract.settings.job import JobConfig
from trainer.training.loop import Trainer

MakeJob = Callable[..., JobConfig]
MakeTrainer = Callable[..., Trainer]
sizes = st.lists(st.integers(1, 60), min_size=2, max_size=4)


@st.composite
def mixtures(draw: st.DrawFn) -> MixedSplit:
    of_sources = draw(sizes)
    weight = st.floats(0.01, 100)
    weights = draw(st.none() | st.lists(weight, min_size=len(of_sources), max_size=len(of_sources)))
    n_held_out = draw(st.integers(0, sum(of_sources) - len(of_sources)))
    return MixedSplit(of_sources, weights, n_held_out, draw(st.integers(0, 9)))


@given(sizes, st.integers(0, 100), st.integers(0, 9), st.sampled_from([1, 4]))
def test_without_weights_each_training_row_occurs_once_per_epoch(
    of_sources: list[int], part: int, seed: int, run: int
) -> None:
    split = MixedSplit(of_sources, None, part * (sum(of_sources) - len(of_sources)) // 100, seed)
    training = sorted({*range(sum(of_sources))} - {*split.held_out.tolist()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.activations.permutation._FEWEST_RUNS", 1)
        order, n = MixedOrder(split, seed, run), split.n_train
        for epoch in range(3):
            assert sorted(order.token_slice(epoch * n, n).tolist()) == training


@given(mixtures(), st.integers(1, 5))
def test_each_source_gets_its_share_of_an_epoch_and_all_its_rows_are_used_in_turn(
    split: MixedSplit, epochs: int
) -> None:
    order, n = MixedOrder(split, 0), split.n_train
    held_out = {*split.held_out.tolist()}
    totals: Counter[int] = Counter()
    for epoch in range(epochs):
        rows = order.token_slice(epoch * n, n)
        assert len(rows) == n
        ends = np.append(split._begins[1:], np.iinfo(np.int64).max)
        counts = np.bincount(np.searchsorted(ends, rows, side="right"), minlength=len(ends))
        assert counts.tolist() == split.draws
        totals.update(rows.tolist())
    assert held_out.isdisjoint(totals)
    for number, source in enumerate(split.splits):
        drawn = [totals[row] for row in split.rows(number, np.arange(source.n_train)).tolist()]
        assert max(drawn) - min(drawn) <= 1


@given(mixtures(), st.integers(0, 300), st.integers(2, 200), st.data())
def test_a_global_batch_does_not_depend_on_how_it_is_split_across_ranks(
    split: MixedSplit, start: int, length: int, data: st.DataObject
) -> None:
    order, cut = MixedOrder(split, 3), data.draw(st.integers(1, length - 1))
    parts = [order.token_slice(start, cut), order.token_slice(start + cut, length - cut)]
    assert np.concatenate(parts).tolist() == order.token_slice(start, length).tolist()


@given(mixtures(), st.integers(0, 100))
def test_a_sample_contains_only_distinct_training_rows(split: MixedSplit, n: int) -> None:
    drawn = split.sample(n, 5).tolist()
    assert len(drawn) == len({*drawn}) == min(n, split.n_train)
    assert {*split.held_out.tolist()}.isdisjoint(drawn)


def test_held_out_rows_and_the_sample_come_from_each_source_in_proportion() -> None:
    split = MixedSplit([1000, 3000], None, 200, 0)
    assert [len(one.held_out) for one in split.splits] == [50, 150]
    split = MixedSplit([1000, 3000], [3, 1], 200, 0)
    assert [len(one.held_out) for one in split.splits] == [150, 50]
    assert (split.sample(400, 0) < 1000).sum() == 300
    # Two sources of the same length hold out different rows.
    first, second = MixedSplit([1000, 1000], None, 200, 0).splits
    assert first.held_out.tolist() != second.held_out.tolist()


@pytest.mark.parametrize(
    ("n", "weights", "most", "expected"),
    [
        (10, [1, 1], None, [5, 5]),
        (10, [1, 2], None, [3, 7]),
        (10, [1.0, 1.0, 1e9], [9, 9, 2], [4, 4, 2]),
        (10, [1, 1, 1], [1, 5, 9], [1, 5, 4]),
        (0, [1, 2], None, [0, 0]),
        (9, [1, 1], [2, 3], [2, 3]),
    ],
)
def test_rows_are_apportioned_by_weight_up_to_the_number_available_in_each_source(
    n: int, weights: list[float], most: list[int] | None, expected: list[int]
) -> None:
    assert apportion(n, weights, most) == expected


@pytest.fixture(name="folders")
def _folders(activations: Path, tmp_path: Path) -> list[str]:
    """Move each of the two shards into its own folder, and return the folders."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (activations / f"{name}.safetensors").rename(tmp_path / name / "x.safetensors")
    return [str(tmp_path / "a"), str(tmp_path / "b")]


def test_row_names_include_the_folder_if_there_are_several_folders(folders: list[str]) -> None:
    source = Shards(path=folders)
    assert (source.n_tokens, source.sizes) == (3000, [1700, 1300])
    assert source.name_of(1701) == "row 1 of b/x.safetensors"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "sae_weights.safetensors")


@pytest.mark.parametrize("data", [{}, {"weights": [1.0, 4.0]}])
def test_a_resumed_run_on_a_mixture_is_bit_identical(
    data: dict[str, Any], folders: list[str], make_job: MakeJob, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    job = make_job(data={"path": folders} | data, train={"n_steps": 40, "checkpoint_every": 13, "keep_checkpoints": 9})
    make_trainer(job, output=tmp_path / "whole").run()
    whole = weights_of(tmp_path / "whole")
    step = tmp_path / "checkpoints" / "step-00000026"
    make_trainer(job, output=tmp_path / "resumed", checkpoints=tmp_path / "again", resume_from=step).run()
    resumed = weights_of(tmp_path / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"weights": [1.0]}, "data.weights: has 1 number for 2 folders of data.path; give one for each"),
        ({"path": []}, "data.path: is an empty list; name a folder of shards"),
        ({"target_path": ["x"]}, "data.target_path: there is nothing at x"),
    ],
)
def test_inconsistent_settings_are_refused(
    data: dict[str, Any], problem: str, folders: list[str], make_job: MakeJob
) -> None:
    with pytest.raises(JobFileError) as caught:
        make_job(data={"path": folders} | data).data_shape()
    assert str(caught.value).startswith(problem)


def test_folders_with_different_widths_are_refused(folders: list[str], make_job: MakeJob) -> None:
    save_file({"activations": torch.zeros(10, 3)}, Path(folders[1]) / "x.safetensors")
    with pytest.raises(JobFileError) as caught:
        make_job(data={"path": folders}).data_shape()
    message = f"{folders[1]} has d_in 3, but {folders[0]} has 16; all mixed folders must have the same width"
    assert str(caught.value) == f"data.path: {message}"


def test_each_folder_in_a_mixture_has_its_own_targets(folders: list[str], make_job: MakeJob) -> None:
    shape = make_job(data={"path": folders, "target_path": folders}).data_shape()
    assert (shape.d_out, shape.n_tokens) == (16, 3000)
    with pytest.raises(JobFileError, match=r"^data\.target_path: has 1 folder, but data\.path has 2; give one for"):
        make_job(data={"path": folders, "target_path": folders[0]}).data_shape()
    with pytest.raises(JobFileError, match=r"^data\.target_path: .* has 1,300 rows, but .* has 1,700;"):
        make_job(data={"path": folders, "target_path": folders[::-1]}).data_shape()

"""Tests for the three ways to hold out rows (by text, by block or individually), and for clustering rows by text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from trainer.activations.mixture import MixedOrder, MixedSplit
from trainer.activations.open_source import continue_from, open_source
from trainer.activations.order import Order
from trainer.activations.shards import Shards
from trainer.activations.split import BLOCK, Split, TooFewTexts, halves_of, split_of
from trainer.activations.texts import Texts
from trainer.activations.training_data import HALVES, open_data
from trainer.contract.errors import UserError
from trainer.contract.runs.data_record import record_of
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group

MakeJob = Callable[..., JobConfig]


@st.composite
def shards_of_texts(draw: st.DrawFn) -> list[np.ndarray]:
    """Draw a text number for each row of several shards. Text lengths vary, and rows may be shuffled."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=4, max_size=30))
    names = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=len(lengths), max_size=len(lengths), unique=True))
    rows = np.repeat(np.array(names), lengths)
    if draw(st.booleans()):
        rows = np.random.default_rng(0).permutation(rows)
    return np.array_split(rows, draw(st.integers(1, 3)))


@given(shards_of_texts(), st.integers(1, 200), st.integers(0, 2**40), st.integers(0, 200))
def test_no_text_is_both_trained_on_and_held_out(parts: list[np.ndarray], wanted: int, seed: int, n_later: int) -> None:
    of_rows = np.concatenate(parts)
    n = len(of_rows)
    n_first = max(1, n - n_later)
    split = split_of(n, min(wanted, n_first - 1), seed, hold_out="texts", texts=Texts(parts), n_first=n_first)
    trained = split.rows(np.arange(split.n_train))
    assert sorted([*trained, *split.left_out]) == list(range(n))
    assert {*Order(split, seed).token_slice(7 * n, 2 * n)} | {*split.sample(n, 1)} == {*trained}
    if split.hold_out == "texts" and len(split.held_out):
        assert {*of_rows[trained]}.isdisjoint(of_rows[split.held_out])
        assert (split.held_out < n_first).all()
        assert split.n_texts == len({*of_rows[split.held_out]})


@given(shards_of_texts(), st.integers(1, 100), st.integers(0, 99))
def test_held_out_rows_stay_held_out_after_rows_are_added(parts: list[np.ndarray], wanted: int, seed: int) -> None:
    n_first = len(parts[0])
    wanted = min(wanted, n_first - 1)
    before = split_of(n_first, wanted, seed, hold_out="texts", texts=Texts(parts[:1]))
    n, texts = sum(map(len, parts)), Texts(parts)
    grown = split_of(n, wanted, seed, hold_out="texts", texts=texts, n_first=n_first)
    assert grown.held_out.tolist() == before.held_out.tolist()
    # If later shards have no recorded texts, all their rows are used for training.
    unknown = [*parts[:1], *(np.full(len(part), -(2**63)) for part in parts[1:])]
    without = split_of(n, wanted, seed, hold_out="texts", texts=Texts(unknown), n_first=n_first)
    assert without.left_out.tolist() == before.held_out.tolist()
    for hold_out in ("rows", "blocks"):
        of_first = Split(n_first, wanted, seed, hold_out=hold_out)
        longer = Split(n, wanted, seed, hold_out=hold_out, n_first=n_first)
        assert longer.held_out.tolist() == of_first.held_out.tolist()


@given(st.integers(2, 5000), st.data(), st.integers(0, 2**40))
def test_holding_out_blocks_takes_exactly_the_requested_number_of_rows_from_many_places(
    n: int, data: st.DataObject, seed: int
) -> None:
    wanted = data.draw(st.integers(0, n - 1))
    held_out = Split(n, wanted, seed, hold_out="blocks").held_out
    assert len({*held_out.tolist()}) == len(held_out) == wanted
    assert (held_out < n).all()
    if wanted > 8 * BLOCK:
        of_blocks = np.bincount(held_out // BLOCK)
        # Nearly every block is held out either completely or not at all.
        assert (of_blocks[of_blocks > 0] >= BLOCK // 2).mean() > 0.8


def test_the_number_of_held_out_rows_is_close_to_the_number_requested() -> None:
    lengths = np.random.default_rng(0).integers(20, 200, 500)
    of_rows = np.repeat(np.arange(500), lengths)
    splits = [Split(len(of_rows), 2000, seed, hold_out="texts", texts=Texts([of_rows])) for seed in range(20)]
    assert all(2000 <= len(one.held_out) < 2200 for one in splits)
    # Each seed holds out different texts.
    assert len({tuple(one.held_out) for one in splits}) == 20


def test_texts_longer_than_requested_are_held_out_only_if_no_text_is_shorter() -> None:
    short = np.repeat(np.arange(100), 10)
    held_out = Split(2000, 50, 0, hold_out="texts", texts=Texts([short, np.full(1000, 999)])).held_out
    assert len(held_out) == 50
    assert held_out.max() < 1000
    # One of ten texts with 100 rows each is held out, although only 50 rows are requested.
    assert len(Split(1000, 50, 0, hold_out="texts", texts=Texts([np.repeat(np.arange(10), 100)])).held_out) == 100


@pytest.mark.parametrize("of_rows", [np.zeros(1000, np.int32), np.repeat([0, 1], 500), np.arange(1000) < 999])
def test_if_there_are_too_few_texts_blocks_are_held_out_unless_texts_are_requested(of_rows: np.ndarray) -> None:
    texts = Texts([of_rows.astype(np.int32)])
    with pytest.raises(TooFewTexts, match=r"^the 1,000 rows come from [12] texts, and the longest has"):
        Split(1000, 50, 0, hold_out="texts", texts=texts)
    split = split_of(1000, 50, 0, hold_out="texts", texts=texts)
    assert split.hold_out == "blocks"
    assert len(split.held_out) == 50


@given(st.lists(st.integers(0, 12), min_size=2, max_size=300))
def test_no_text_is_in_both_halves_unless_it_has_over_three_quarters_of_the_rows(labels: list[int]) -> None:
    halves, n = halves_of(np.array(labels)), len(labels)
    assert np.bincount(halves, minlength=2).min() >= n / 4
    if max(np.bincount(labels)) <= 3 * n / 4:
        assert len({*zip(labels, halves.tolist(), strict=True)}) == len({*labels})


def labels_of(parts: list[list[int]], **options: bool) -> list[int]:
    texts = Texts([np.array(part, np.int64) for part in parts], **options)
    return texts.labels(np.arange(texts.n_rows)).tolist()


def test_equal_text_numbers_mean_the_same_text_unless_the_numbers_restart() -> None:
    # Text numbers restart at 0 in each shard, or in each process if a process wrote several shards.
    assert labels_of([[0, 0, 1], [0, 1, 2]], numbered_through=False) == [0, 0, 1, 2, 3, 4]
    assert labels_of([[0, 1], [1, 2], [0, 1], [2]], numbered_through=False) == [0, 1, 1, 2, 3, 4, 5]
    # An extraction numbers its texts continuously across shards.
    assert labels_of([[0, 0, 1], [0, 1, 2]]) == [0, 0, 1, 0, 1, 2]
    # A text may continue in the next shard, the shards of two processes may alternate, and numbers may be unordered.
    assert labels_of([[0, 0], [0, 1]], numbered_through=False) == [0, 0, 0, 1]
    assert labels_of([[0, 5], [0, 5], [5, 9], [5, 9]], numbered_through=False) == [0, 1, 0, 1, 1, 2, 1, 2]
    assert labels_of([[7, 3], [1, 4]], numbered_through=False) == [3, 1, 0, 2]
    # Rows may be shuffled across all shards.
    assert labels_of([[1, 0, 2], [2, 0, 1]], numbered_through=False) == [1, 0, 2, 2, 0, 1]


def test_a_mixture_holds_out_entire_texts_from_each_folder() -> None:
    of_rows = [np.repeat(np.arange(60), 20), np.repeat(np.arange(40), 50)]
    texts = [Texts([one]) for one in of_rows]
    split = MixedSplit([1200, 2000], None, 160, 3, hold_out="texts", texts=texts)
    assert split.hold_out == "texts"
    # The same text number in two folders stands for two different texts.
    names = np.concatenate([of_rows[0], of_rows[1] + 1000])
    trained = MixedOrder(split, 3).token_slice(0, split.n_train)
    assert sorted([*trained, *split.held_out]) == list(range(3200))
    assert {*names[trained]}.isdisjoint(names[split.held_out])
    assert [len(one.held_out) for one in split.splits] == [60, 100]


def with_documents(activations: Path) -> None:
    """Assign a document number to every 50 consecutive rows, across both shards."""
    first = 0
    for file in sorted(activations.glob("*.safetensors")):
        rows = load_file(file)["activations"]
        documents = (first + torch.arange(len(rows))) // 50
        save_file({"activations": rows, "document": documents}, file)
        first += len(rows)


def split_by(job: JobConfig) -> Any:
    source = Shards(path=job.data.settings.path)
    return open_data(source, job, Parallel(torch.device("cpu"))).split


def test_if_all_shards_record_texts_the_same_ones_are_held_out_with_any_training_seed(
    activations: Path, make_job: MakeJob
) -> None:
    assert make_job().hold_out == "blocks"
    with_documents(activations)
    assert make_job().hold_out == "texts"
    first, other_seed = (split_by(make_job(train={"seed": seed})) for seed in (0, 5))
    assert first.hold_out == "texts"
    assert first.held_out.tolist() == other_seed.held_out.tolist()
    assert {*np.bincount(first.held_out // 50)} == {0, 50}
    assert split_by(make_job(data={"split_seed": 1})).held_out.tolist() != first.held_out.tolist()
    (activations / "meta.json").write_text('{"shuffled": true}')
    save_file({"activations": load_file(activations / "b.safetensors")["activations"]}, activations / "b.safetensors")
    assert make_job().hold_out == "rows"


def test_holding_out_texts_that_are_not_recorded_produces_a_one_sentence_error(
    activations: Path, make_job: MakeJob
) -> None:
    why = "whole texts cannot be held out, since the texts of the rows are unknown"
    with pytest.raises(UserError, match=rf'^data\.hold_out: {why}; use "blocks"$'):
        split_by(make_job(data={"hold_out": "texts"}))


def test_rows_are_clustered_by_text_or_by_block_if_texts_are_unknown(activations: Path, make_job: MakeJob) -> None:
    def clusters() -> Any:
        job = make_job(data={"hold_out": "rows"})
        data = open_data(Shards(path=str(activations)), job, Parallel(torch.device("cpu")))
        return data.split.held_out, data.of_hook(0).clusters()

    held_out, found = clusters()
    assert found.of == "blocks"
    assert found.labels.tolist() == (held_out // BLOCK).tolist()
    with_documents(activations)
    held_out, found = clusters()
    assert found.of == "texts"
    _, expected = np.unique(held_out // 50, return_inverse=True)
    assert found.labels.tolist() == expected.tolist()


@pytest.mark.parametrize("knows_texts", [True, False])
def test_a_growing_folder_keeps_its_held_out_rows_even_if_new_shards_lack_text_ids(
    knows_texts: bool, activations: Path, make_job: MakeJob
) -> None:
    with_documents(activations)
    job = make_job()
    before, record = split_by(job), record_of(job.hooks.values())
    # The last text of the old shards continues in the new shard.
    more = {"activations": torch.randn(500, 16)}
    documents = {"document": (2990 + torch.arange(500)) // 50} if knows_texts else {}
    save_file(more | documents, activations / "c.safetensors")
    source = open_source(job)
    continue_from(source, job, record)
    grown = open_data(source, job, Parallel(torch.device("cpu")))
    assert grown.hold_out == "texts"
    assert grown.split.held_out.tolist() == before.held_out.tolist()
    assert grown.n_held_out == 150


@pytest.mark.parametrize("knows_texts", [True, False])
def test_adding_shards_moves_no_held_out_row_to_another_half_or_cluster(
    knows_texts: bool, activations: Path, make_job: MakeJob
) -> None:
    # The text numbers restart in each shard.
    for file in sorted(activations.glob("*.safetensors")):
        rows = load_file(file)["activations"]
        save_file({"activations": rows, "document": torch.arange(len(rows)) // 50}, file)
    job = make_job()

    def groups() -> list[list[int]]:
        rows = open_data(source, job, Parallel(torch.device("cpu"))).of_hook(0)
        return [rows.clusters().labels.tolist(), rows.of_half(0).tolist()]

    source, record = open_source(job), record_of(job.hooks.values())
    before = groups()
    more = {"activations": torch.randn(500, 16)}
    documents = {"document": torch.arange(500).flip(0) // 50} if knows_texts else {}
    save_file(more | documents, activations / "c.safetensors")
    source = open_source(job)
    continue_from(source, job, record)
    assert groups() == before


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_ranks_agree_on_halves_that_consist_of_entire_texts_without_rereading_a_shard(
    n_ranks: int, activations: Path, make_job: MakeJob
) -> None:
    with_documents(activations)
    source, job = Shards(path=str(activations)), make_job()
    held_out, of_half = split_by(job).held_out, dict[int, set[int]]()
    for index in range(n_ranks):
        group = Group()
        group.index, group.size = index, n_ranks
        rows = open_data(source, job, Parallel(torch.device("cpu"), data=group)).of_hook(0)
        own = held_out[index::n_ranks]
        for half in HALVES:
            of_half.setdefault(half, set()).update(own[rows.of_half(half)].tolist())
    assert of_half[0] | of_half[1] == {*held_out.tolist()}
    assert {row // 50 for row in of_half[0]}.isdisjoint(row // 50 for row in of_half[1])
    # Reading past the end of a truncated memory-mapped file would kill the process.
    for file in activations.glob("*.safetensors"):
        os.truncate(file, 64)
    assert sorted(np.concatenate([rows.of_half(half) for half in HALVES]).tolist()) == list(range(len(own)))
    assert len(rows.clusters().labels) == len(own)

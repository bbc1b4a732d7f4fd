"""Tests for a checkpoint's record of shards, which shows whether the data is unchanged, extended or different."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.contract.errors import JobFileError
from trainer.contract.runs import data_record
from trainer.contract.runs.data_record import DataRecord, cut_short, news_of_data, record_of, sampled
from trainer.contract.settings.sources import ShardSettings, SyntheticSettings


def save(file: Path, n_rows: int, seed: int = 0) -> None:
    file.parent.mkdir(exist_ok=True)
    np.save(file, np.random.default_rng(seed).standard_normal((n_rows, 8)).astype(np.float32))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write two shards, b.npy and d.npy."""
    save(tmp_path / "acts" / "b.npy", 100)
    save(tmp_path / "acts" / "d.npy", 60, 1)
    return tmp_path / "acts"


def recorded(folder: Path) -> DataRecord:
    """Return a folder's record after a round trip through a checkpoint's JSON."""
    record = sampled(record_of([ShardSettings(str(folder))]))
    return msgspec.json.decode(msgspec.json.encode(record), type=DataRecord)


def refusal(folder: Path, before: DataRecord) -> str:
    with pytest.raises(JobFileError) as caught:
        record_of([ShardSettings(str(folder))], before)
    (problem,) = caught.value.problems
    assert problem.path == "data.path"
    assert problem.message.endswith("; restore the data, or start a new run on the current data")
    return problem.message


def shuffle_rows(file: Path) -> None:
    rows = np.load(file)
    np.save(file, rows[::-1].copy())


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size + 32)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (Path.unlink, "d.npy in {folder}, which is missing"),
    "renamed": (lambda file: file.rename(file.with_name("e.npy")), "d.npy in {folder}, which is missing"),
    "shorter": (lambda file: save(file, 59, 1), "d.npy in {folder}, which has 59 rows instead of 60"),
    "longer": (lambda file: save(file, 61, 1), "d.npy in {folder}, which has 61 rows instead of 60"),
    "with extra bytes": (cut, "d.npy in {folder}, which has 2,080 bytes instead of 2,048"),
    "other values": (lambda file: save(file, 60, 2), "d.npy in {folder}, which contains different values"),
    "with shuffled rows": (shuffle_rows, "d.npy in {folder}, which contains different values"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_shard_is_refused_with_its_name_and_the_change(change: str, folder: Path) -> None:
    before, (act, said) = recorded(folder), CHANGES[change]
    act(folder / "d.npy")
    assert f"the run was trained on {said.format(folder=folder)}" in refusal(folder, before)


def test_copied_and_touched_files_with_the_same_content_count_as_the_same_data(folder: Path, tmp_path: Path) -> None:
    before = recorded(folder)
    os.utime(folder / "b.npy", ns=(1, 1))
    (folder / "d.npy").rename(tmp_path / "d.npy")
    shutil.copyfile(tmp_path / "d.npy", folder / "d.npy")
    os.utime(folder / "d.npy", ns=(2, 2))
    now = record_of([ShardSettings(str(folder))], before)
    assert news_of_data(before, now) is None
    # In a copy of the folder, each shard has the same sample.
    shutil.copytree(folder, tmp_path / "elsewhere")
    moved = record_of([ShardSettings(str(tmp_path / "elsewhere"))], before)
    assert [one.sample for one in moved[0].shards] == [one.sample for one in before[0].shards]


def test_new_shards_follow_the_old_ones_and_have_no_held_out_rows(
    folder: Path,
) -> None:
    before = recorded(folder)
    save(folder / "a.npy", 7)
    save(folder / "c.npy", 5)
    grown = sampled(record_of([ShardSettings(str(folder))], before))
    assert grown[0].names == ["b.npy", "d.npy", "a.npy", "c.npy"]
    assert grown[0].split_rows == 160
    said = "data.path: the data has grown by 12 rows in a.npy and c.npy; the held-out rows stay the same, and training"
    assert (news_of_data(before, grown) or "").startswith(said)
    save(folder / "0.npy", 1)
    again = record_of([ShardSettings(str(folder))], grown)
    assert again[0].names == ["b.npy", "d.npy", "a.npy", "c.npy", "0.npy"]
    assert again[0].split_rows == 160


def test_every_folder_of_inputs_and_targets_is_recorded(folder: Path, tmp_path: Path) -> None:
    for name in ("other", "to", "other-to"):
        shutil.copytree(folder, tmp_path / name)
    inputs, targets = [str(folder), str(tmp_path / "other")], [str(tmp_path / "to"), str(tmp_path / "other-to")]
    settings = ShardSettings(inputs, targets)
    before = sampled(record_of([settings]))
    assert [(one.field, one.path) for one in before] == [
        *(("data.path", path) for path in inputs),
        *(("data.target_path", path) for path in targets),
    ]
    save(tmp_path / "other-to" / "b.npy", 100, 5)
    refusal = r"data.target_path: .* b.npy in .*other-to, which contains different values"
    with pytest.raises(JobFileError, match=refusal):
        record_of([settings], before)
    assert record_of([SyntheticSettings()]) == []


def test_a_changed_sha256_in_meta_json_is_refused_despite_equal_size_and_time(folder: Path) -> None:
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("b.npy", "d.npy")}
    (folder / "meta.json").write_text(json.dumps({"shards": sums}))
    before = recorded(folder)
    (folder / "meta.json").write_text(json.dumps({"shards": sums | {"b.npy": "0" * 64}}))
    assert "b.npy in" in (said := refusal(folder, before))
    assert "has a different SHA-256 in meta.json" in said


def test_the_sample_of_a_large_shard_detects_reordered_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_record, "BLOCK", 64)
    monkeypatch.setattr(data_record, "_SAMPLED_BYTES", 2 * 64 * 5)
    before = recorded(folder)
    assert [one.n_blocks for one in before[0].shards] == [5, 5]
    os.utime(folder / "b.npy", ns=(1, 1))
    assert record_of([ShardSettings(str(folder))], before)[0].names == ["b.npy", "d.npy"]
    shuffle_rows(folder / "b.npy")
    assert "b.npy" in refusal(folder, before)


@given(size=st.integers(1, 10_000), n_blocks=st.integers(2, 60))
def test_sampled_blocks_lie_within_the_file_and_include_both_ends(size: int, n_blocks: int) -> None:
    size += n_blocks * data_record.BLOCK
    places = data_record._places(size, n_blocks)
    assert (places[0], places[-1] + data_record.BLOCK) == (0, size)
    assert all(second - first >= data_record.BLOCK for first, second in itertools.pairwise(places))


def test_a_truncated_shard_is_named(folder: Path) -> None:
    before = recorded(folder)
    assert cut_short(before) is None
    os.truncate(folder / "d.npy", 1000)
    said = f"{folder / 'd.npy'} was truncated to 1,000 of 2,048 bytes while it was read; copy it again, then resume"
    assert cut_short(before) == said


def test_a_shard_that_changes_before_it_is_sampled_is_refused(folder: Path) -> None:
    record = record_of([ShardSettings(str(folder))])
    save(folder / "d.npy", 60, 2)
    os.utime(folder / "d.npy", ns=(1, 1))
    before = sampled(record)
    assert [one.sample is None for one in before[0].shards] == [False, True]
    assert "d.npy in" in refusal(folder, before)


def test_a_file_that_cannot_be_sampled_is_identified_by_its_modification_time(folder: Path) -> None:
    record = record_of([ShardSettings(str(folder))])
    (folder / "d.npy").rename(folder / "d")
    before = sampled(record)
    (folder / "d").rename(folder / "d.npy")
    assert before[0].shards[1].sample is None
    assert record_of([ShardSettings(str(folder))], before)[0].names == ["b.npy", "d.npy"]
    os.utime(folder / "d.npy", ns=(1, 1))
    assert "d.npy" in refusal(folder, before)

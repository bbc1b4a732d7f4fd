from __future__ import annotations

from pathlib import Path

import pytest

from sae_tui.jobs.launch import kept_draft
from sae_tui.jobs.launch.job_form import Draft, read_job_table
from trainer.contract.paths import DataDir

VALUES = {"data.path": "data/sample", "sae.k": 7}


def test_each_job_kind_has_its_own_draft_which_keeps_only_valid_settings(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "not made yet")
    kept_draft.keep(data, Draft(VALUES, {"train.lr": "must be a number"}, [0, 2]))
    assert kept_draft.kept(data, "extract") is None
    left = kept_draft.kept(data, "train")
    assert left is not None
    table = read_job_table(left)
    assert (table["sae"]["k"], table["launch"]["gpus"], table["train"]["lr"]) == (7, [0, 2], "auto")
    kept_draft.drop(data, "train")
    kept_draft.drop(data, "train")
    assert kept_draft.kept(data, "train") is None


@pytest.mark.parametrize("text", ["sae = 3", "not TOML", "[sae]\nk = -1\n"])
def test_an_unreadable_draft_is_ignored(text: str, tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    kept_draft.file_of(data, "train").write_text(text)
    assert kept_draft.kept(data, "train") is None


def test_a_draft_file_that_is_a_link_is_ignored(tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    kept_draft.keep(data, Draft(VALUES, {}, "auto"))
    file = kept_draft.file_of(data, "train")
    file.symlink_to(file.rename(tmp_path / "elsewhere.toml"))
    assert kept_draft.kept(data, "train") is None


def test_a_form_keeps_one_draft_for_its_job_kind(tmp_path: Path) -> None:
    data, training, extraction = DataDir(tmp_path), Draft(VALUES, {}, "auto"), Draft({"kind": "extract"}, {}, "auto")
    kept_draft.keep(data, extraction)
    form = kept_draft.KeptDraft(data)

    def left() -> list[str]:
        return [kind for kind in ("train", "extract") if kept_draft.file_of(data, kind).exists()]

    form.follow(training, is_changed=False)
    assert left() == ["extract"]
    form.follow(training, is_changed=True)
    assert left() == ["train", "extract"]
    form.note_filled(tmp_path / "preset.toml", "extract")
    form.follow(extraction, is_changed=False)
    # The form deletes its training draft when it switches to extraction; the other draft belongs to another form.
    assert left() == ["extract"]
    form.note_filled(kept_draft.file_of(data, "extract"), "extract")
    form.follow(extraction, is_changed=False)
    assert (left(), form.is_left) == (["extract"], True)
    form.note_filled(tmp_path / "preset.toml", "extract")
    form.follow(extraction, is_changed=False)
    assert left() == []


def test_a_draft_that_cannot_be_written_causes_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept_draft.keep(DataDir(tmp_path / "file"), Draft(VALUES, {}, "auto"))
    kept_draft.drop(DataDir(tmp_path / "file"), "train")

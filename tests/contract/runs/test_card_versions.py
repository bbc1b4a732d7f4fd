"""Tests for the older versions of a report card, which are kept next to the SAE's weights."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest
from support.features import features_file
from support.report_cards import put_card

from trainer.contract.runs.card_versions import FOLDER, archive, versions
from trainer.contract.runs.features import FEATURES


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a folder with a report card and features."""
    put_card(tmp_path)
    (tmp_path / FEATURES).write_bytes(features_file())
    return tmp_path


def test_copied_features_are_private_and_complete(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse)
    before = os.umask(0o022)
    try:
        archive(folder)
    finally:
        os.umask(before)
    (copy,) = (folder / FOLDER).glob("*.safetensors")
    assert copy.read_bytes() == (folder / FEATURES).read_bytes()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600


def test_a_failed_copy_leaves_no_file_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse)
    for name in ("copyfile", "copyfileobj"):
        monkeypatch.setattr(shutil, name, fails_halfway)
    with pytest.raises(OSError, match="No space left"):
        archive(folder)
    assert not list((folder / FOLDER).iterdir())


def fails_halfway(_: object, target: object, *__: object) -> None:
    if isinstance(target, Path):
        target.write_bytes(b"half")
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_link_in_place_of_a_features_file_is_not_stored(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "secret"
    (folder / FEATURES).rename(elsewhere)
    (folder / FEATURES).symlink_to(elsewhere)
    archive(folder)
    assert not list((folder / FOLDER).glob("*.safetensors"))


def test_another_users_card_cannot_name_features_outside_the_folder(folder: Path) -> None:
    archive(folder)
    put_card(folder / "other")
    (stored,) = (folder / FOLDER).glob("*.json")
    put_card(folder, features="../features", tokens=5)
    (folder / "card.json").rename(stored)
    (one,) = versions(folder)
    assert (one.card.tokens, one.features) == (5, None)

"""Tests that a link in the hub's cache is followed only if it leads to a blob of the same model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.contract.hub_cache import is_plain_file, plain_file
from trainer.contract.settings.language import lack_of_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Create a model's cache with one snapshot, where `layers.10/cfg.json` is a link to a blob."""
    model = tmp_path / "hub" / "models--a--b"
    (model / "blobs").mkdir(parents=True)
    (model / "blobs" / "abc").write_text("{}")
    snapshot(model).mkdir(parents=True)
    (snapshot(model) / "cfg.json").symlink_to("../../../blobs/abc")
    return model


def snapshot(model: Path) -> Path:
    return model / "snapshots" / "0123" / "layers.10"


def test_a_file_and_a_link_to_a_blob_of_the_same_model_are_accepted(model: Path, tmp_path: Path) -> None:
    link, blob = snapshot(model) / "cfg.json", model / "blobs" / "abc"
    assert plain_file(blob) == blob
    assert plain_file(link) == blob
    # If a relative link is impossible, the hub's client writes an absolute one.
    absolute = snapshot(model) / "absolute"
    absolute.symlink_to(blob)
    assert plain_file(absolute) == blob
    # The path to the cache itself may contain a link because the user chose it.
    (tmp_path / "elsewhere").symlink_to(model.parent)
    assert plain_file(tmp_path / "elsewhere" / link.relative_to(model.parent)) == blob
    with pytest.raises(FileNotFoundError):
        plain_file(snapshot(model) / "nothing")


def out_of_the_cache(model: Path) -> str:
    (model.parent.parent / "secret").write_text("")
    return "../../../../../secret"


def to_another_model(model: Path) -> str:
    (model.parent / "models--c--d" / "blobs").mkdir(parents=True)
    (model.parent / "models--c--d" / "blobs" / "abc").write_text("")
    return "../../../../models--c--d/blobs/abc"


def chain(model: Path) -> str:
    (model / "blobs" / "chain").symlink_to("abc")
    return "../../../blobs/chain"


def chain_in_the_snapshot(model: Path) -> str:
    return "cfg.json"


def fifo(model: Path) -> str:
    os.mkfifo(model / "blobs" / "fifo")
    return "../../../blobs/fifo"


def folder(model: Path) -> str:
    (model / "blobs" / "folder").mkdir()
    return "../../../blobs/folder"


def below_the_blobs(model: Path) -> str:
    (model / "blobs" / "deep").mkdir()
    (model / "blobs" / "deep" / "abc").write_text("")
    return "../../../blobs/deep/abc"


def blobs_that_are_a_link(model: Path) -> str:
    (model / "blobs").rename(model.parent / "moved")
    (model / "blobs").symlink_to(model.parent / "moved")
    return "../../../blobs/abc"


def device(model: Path) -> str:
    return "/dev/zero"


def itself(model: Path) -> str:
    return "hostile"


def through_a_loop(model: Path) -> str:
    (model / "loop").symlink_to("loop")
    return "../../../loop/abc"


HOSTILE: list[Callable[[Path], str]] = [
    out_of_the_cache, to_another_model, chain, chain_in_the_snapshot, fifo, folder, below_the_blobs,
    blobs_that_are_a_link, device, itself, through_a_loop,
]  # fmt: skip


@pytest.mark.parametrize("target", HOSTILE, ids=lambda one: one.__name__)
def test_any_other_link_is_refused(target: Callable[[Path], str], model: Path) -> None:
    link = snapshot(model) / "hostile"
    link.symlink_to(target(model))
    copy = "replace it with a copy of the file, as `cp -rL` does$"
    refusal = rf"^is (a|part of a loop of) symbolic link.*not followed; {copy}"
    with pytest.raises(ValueError, match=refusal):
        plain_file(link)
    assert not is_plain_file(link)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_another_users_blob_is_accepted_only_through_a_link_owned_by_that_user(model: Path) -> None:
    link, blob = snapshot(model) / "cfg.json", model / "blobs" / "abc"
    os.chown(blob, 54321, -1)
    with pytest.raises(ValueError, match="is a symbolic link to another user's file"):
        plain_file(link)
    os.chown(link, 54321, -1, follow_symlinks=False)
    assert plain_file(link) == blob


@pytest.mark.parametrize("place", ["models--a--b/refs", "datasets--a--b/snapshots/0123", "folder"])
def test_a_link_in_any_other_folder_is_refused(place: str, tmp_path: Path) -> None:
    link = tmp_path / place / "cfg.json"
    link.parent.mkdir(parents=True)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_text("")
    link.symlink_to(blobs / "abc")
    with pytest.raises(ValueError, match="is a symbolic link, and symbolic links are not followed"):
        plain_file(link)


def test_an_interrupted_download_is_refused_and_the_missing_file_is_named(model: Path) -> None:
    folder = model / "snapshots" / "0123"
    (folder / "config.json").symlink_to("../../blobs/abc")
    (folder / "README.md").symlink_to("/nothing")
    assert lack_of_model(str(folder)) == ""
    (folder / "tokenizer.json").symlink_to("../../blobs/gone")
    assert "tokenizer.json is a symbolic link to a file that does not exist" in lack_of_model(str(folder))

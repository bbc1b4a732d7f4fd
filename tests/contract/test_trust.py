"""Tests that files and folders are trusted only if their owner and permissions keep other users from changing them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sae_tui.settings import load_settings
from trainer.contract.paths import DataDir, private_folder
from trainer.contract.settings.toml import Judged
from trainer.contract.store.job_store import Control
from trainer.contract.trust import distrust_of_file, distrust_of_folder, distrust_of_program, sharing

OTHER_USER = 61_002
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """Return a project folder like one on a cluster, with the setgid bit and group write permission."""
    tmp_path.chmod(0o2775)
    return tmp_path


def test_folders_under_a_project_folder_are_private_by_default(lab: Path) -> None:
    data = DataDir(lab / "direct")
    data.create()
    Control(data.control_db).close()
    data.run(1).create()
    assert {oct(mode(path)) for path in (data.root, *data.root.rglob("*")) if path.is_dir()} == {"0o700"}
    assert mode(data.control_db) == 0o600
    assert mode(private_folder(lab / "runs" / "mine")) == 0o700
    assert sharing(data.root) == ""


def test_everything_in_an_explicitly_shared_data_folder_is_shared(lab: Path) -> None:
    data = DataDir(lab / "ours")
    data.root.mkdir()
    data.root.chmod(0o2770)
    data.create()
    Control(data.control_db).close()
    data.run(1).create()
    assert {oct(mode(path)) for path in (data.root, *data.root.rglob("*")) if path.is_dir()} == {"0o2770"}
    assert mode(data.control_db) == 0o660
    assert sharing(data.root).startswith("group ")


def test_a_world_writable_folder_is_not_trusted(tmp_path: Path) -> None:
    assert distrust_of_folder(tmp_path) == distrust_of_folder(tmp_path / "none") == ""
    tmp_path.chmod(0o1777)
    assert distrust_of_folder(tmp_path) == f"any user may write to {tmp_path}; `chmod o-w` it"


@as_root
def test_another_users_folder_is_trusted_only_if_shared_with_a_group(tmp_path: Path) -> None:
    os.chown(tmp_path, OTHER_USER, OTHER_USER)
    assert distrust_of_folder(tmp_path) == f"{tmp_path} belongs to uid {OTHER_USER} and is shared with no group"
    tmp_path.chmod(0o2770)
    assert distrust_of_folder(tmp_path) == ""
    assert sharing(tmp_path) == f"group {OTHER_USER}"


def test_the_job_end_command_runs_only_from_a_file_that_others_cannot_write(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('on_job_end = ["id"]\ntheme = "light"\n')
    file.chmod(0o600)
    settings, problems = load_settings(file)
    assert (settings.on_job_end, problems) == (["id"], [])
    file.chmod(0o660)
    settings, (problem,) = load_settings(file)
    assert (settings.on_job_end, settings.theme) == ([], "light")
    assert str(problem) == f"on_job_end: will not be run, because others may write to {file}; `chmod go-w` it"


@as_root
def test_settings_in_another_users_file_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('on_job_end = ["id"]\n')
    os.chown(file, OTHER_USER, OTHER_USER)
    assert distrust_of_file(file) == f"{file} belongs to uid {OTHER_USER}"
    assert load_settings(file)[0].on_job_end == []


def test_a_program_is_trusted_if_others_cannot_change_any_part_of_its_path(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (program := tmp_path / "a" / "program").touch()
    (tmp_path / "link").symlink_to("a/b/../program")
    # The folder has the sticky bit set, like /tmp, so only the owner of an entry can replace it.
    tmp_path.chmod(0o1777)
    ways = (program, tmp_path / "link", tmp_path / "a" / "b" / ".." / "program")
    assert [distrust_of_program(way) for way in ways] == ["", "", ""]
    for place, wrong in ((tmp_path / "a" / "b", ways[1:]), (tmp_path / "a", ways), (program, ways)):
        before = mode(place)
        place.chmod(0o770)
        assert {distrust_of_program(way) for way in wrong} == {f"others may write to {place}; `chmod go-w` it"}
        place.chmod(before)
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(OSError, match="Too many levels"):
        distrust_of_program(tmp_path / "circle")


@as_root
def test_a_program_behind_another_users_link_is_not_trusted(tmp_path: Path) -> None:
    (program := tmp_path / "program").touch()
    (link := tmp_path / "link").symlink_to(program)
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
    assert distrust_of_program(program) == ""
    assert distrust_of_program(link) == f"{link} belongs to uid {OTHER_USER}"


def test_trust_depends_on_the_file_that_was_read_and_not_on_its_name(tmp_path: Path) -> None:
    (theirs := tmp_path / "theirs").write_text("python = 1")
    theirs.chmod(0o666)
    (file := tmp_path / "job.toml").write_text("name = 1")

    class Swapping(type(file)):
        """A path whose file is replaced with another file as soon as it has been opened."""

        def open(self, *arguments, **options):
            stream = super().open(*arguments, **options)
            file.replace(theirs)
            return stream

    judged = Judged(pipes=True)
    assert judged(Swapping(theirs)) == "python = 1"
    assert judged.distrust == f"others may write to {theirs}; `chmod go-w` it"
    assert distrust_of_file(theirs) == ""


def test_data_from_the_users_own_pipe_is_trusted() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"name = 1")
    os.close(writer)
    judged = Judged(pipes=True)
    assert (judged(Path(f"/dev/fd/{reader}")), judged.distrust) == ("name = 1", "")
    os.close(reader)

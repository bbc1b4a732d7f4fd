"""Tests for atomic writes: a killed writer leaves either the old or the new file, and links are never followed."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from trainer.contract import files
from trainer.contract.files import lfs_pointer_in, open_plain, write_own, write_whole
from trainer.contract.paths import DataDir

OLD, NEW = b"old " * 10_000, b"new " * 20_000
# This program kills a writer before and after each of its calls into C code, including all system calls. After each
# kill, it prints whether the content is old, new or mixed, and the number of temporary files.
KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from trainer.contract.files import write_whole

path, old, new = Path(sys.argv[1]), b"old " * 10_000, b"new " * 20_000
for n_calls in itertools.count(1):
    path.write_bytes(old)
    pid = os.fork()
    if not pid:
        left = [n_calls]
        def count(frame, event, argument):
            if event in ("c_call", "c_return"):
                left[0] -= 1
                if not left[0]:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.setprofile(count)
        write_whole(path, new)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    content = path.read_bytes()
    others = [file.read_bytes() for file in path.parent.iterdir() if file != path]
    for file in path.parent.iterdir():
        file.unlink()
    print({old: "old", new: "new"}.get(content, "half"), len(others), flush=True)
    if not status:
        break
"""
Become = Callable[[], AbstractContextManager[None]]


def test_a_writer_killed_at_any_call_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, tmp_path / "file.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    contents = [line.split() for line in done.stdout.splitlines()]
    assert {content for content, _ in contents} == {"old", "new"}
    assert {int(n_others) for _, n_others in contents} == {0, 1}
    # Once the new file is in place, it stays there, and there is no temporary file.
    first = contents.index(["new", "0"])
    assert {tuple(one) for one in contents[first:]} == {("new", "0")}
    assert len(contents) > 30


def test_a_file_and_its_name_are_synced_to_disk_unless_durable_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        synced.append(f"{kind} with {sorted(file.name for file in tmp_path.iterdir() if file.name[0] != '.')}")

    monkeypatch.setattr(files.os, "fsync", sync)
    write_whole(tmp_path / "a", "text")
    assert synced == ["file with []", "folder with ['a']"]
    write_whole(tmp_path / "b", "text", durable=False)
    assert len(synced) == 2
    assert (tmp_path / "b").read_text() == "text"


def test_a_file_can_be_written_to_an_unreadable_folder(open_folder: Path, ordinary_user: Become) -> None:
    open_folder.chmod(0o333)
    with ordinary_user():
        write_whole(open_folder / "a", "text")
    open_folder.chmod(0o755)
    assert (open_folder / "a").read_text() == "text"


def test_a_link_is_replaced_and_its_target_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    (tmp_path / "file").symlink_to(tmp_path / "key")
    write_whole(tmp_path / "file", "text")
    assert not (tmp_path / "file").is_symlink()
    assert ((tmp_path / "file").read_text(), (tmp_path / "key").read_text()) == ("text", "secret")


def test_a_failed_write_leaves_the_old_file_and_no_temporary_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_whole(tmp_path / "folder", "text")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize(("shared", "whole", "own"), [(False, 0o600, 0o600), (True, 0o660, 0o640)])
def test_a_group_can_read_a_file_only_if_the_folder_is_shared_with_it(
    shared: bool, whole: int, own: int, tmp_path: Path
) -> None:
    data = DataDir(tmp_path / "data")
    data.create()
    if shared:
        data.root.chmod(0o2770)
    write_whole(data.root / "whole", "text")
    write_own(data.root / "own", "text")
    modes = [stat.S_IMODE((data.root / name).stat().st_mode) for name in ("whole", "own")]
    assert modes == [whole, own]


def test_anything_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is not a plain file"):
            open_plain(path)


@pytest.mark.parametrize("size", [20, 2000])
def test_a_git_lfs_pointer_is_refused_and_other_small_files_are_read(size: int, tmp_path: Path) -> None:
    pointer, file = tmp_path / "model.safetensors", tmp_path / "a.json"
    pointer.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 12345\n")
    file.write_bytes(b"x" * size)
    with open_plain(file) as stream:
        assert stream.read() == b"x" * size
    with pytest.raises(OSError, match="it is a git-lfs pointer, not the file; run `git lfs pull`"):
        open_plain(pointer)
    assert lfs_pointer_in(tmp_path) == lfs_pointer_in(pointer) == pointer
    assert lfs_pointer_in(file) is lfs_pointer_in(tmp_path / "gone") is None

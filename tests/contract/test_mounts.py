"""Tests for looking up a path's file system type in the kernel's list of mounts."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from trainer.contract import mounts
from trainer.contract.mounts import mount_of, network_file_system


@pytest.fixture
def as_if(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that changes the temporary folder's file system type in a copy of the kernel's mount list."""

    def write(kind: str) -> None:
        device = os.stat(tmp_path).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        listed = Path("/proc/self/mountinfo").read_text()
        lines = [
            f"{left} - {kind} {right.split(' ', 1)[1]}" if left.split()[2] == number else f"{left} - {right}"
            for left, _, right in (line.partition(" - ") for line in listed.splitlines(keepends=True))
        ]
        (tmp_path / "mountinfo").write_text("".join(lines))
        monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mountinfo")

    return write


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "bcachefs"])
def test_disk_file_systems_are_local(as_if, tmp_path: Path, kind: str) -> None:
    as_if(kind)
    assert network_file_system(tmp_path) is None


def test_this_machines_temporary_folder_is_local(tmp_path: Path) -> None:
    assert network_file_system(tmp_path) is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("nfs", "NFS"), ("nfs4", "NFS"), ("cifs", "CIFS"), ("lustre", "Lustre"), ("gpfs", "GPFS"),
        ("beegfs", "BeeGFS"), ("ceph", "CephFS"), ("9p", "9p"), ("virtiofs", "virtiofs"), ("afs", "AFS"),
        ("ocfs2", "OCFS2"), ("gfs2", "GFS2"), ("fuse.sshfs", "FUSE (sshfs)"), ("fuse.juicefs", "FUSE (juicefs)"),
        ("fuseblk", "FUSE"), ("a-file-system-of-next-year", "a-file-system-of-next-year"),
    ],
)  # fmt: skip
def test_all_other_file_system_types_are_not_local(as_if, tmp_path: Path, kind: str, name: str) -> None:
    as_if(kind)
    (tmp_path / "file").touch()
    assert network_file_system(tmp_path) == network_file_system(tmp_path / "file") == name


def test_a_path_with_an_unknown_mount_is_not_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert network_file_system(tmp_path / "missing") == "an unknown file system"
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "no-proc")
    assert network_file_system(tmp_path) == "an unknown file system"


def test_a_mounts_device_number_matches_the_number_in_proc_locks(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with subprocess.Popen(["flock", lock, "sleep", "60"]) as holder:
        place = b""
        deadline = time.monotonic() + 10
        while not place and time.monotonic() < deadline:
            inode = f":{lock.stat().st_ino} ".encode() if lock.exists() else b"?"
            place = next((line for line in Path("/proc/locks").read_bytes().splitlines() if inode in line), b"")
        holder.kill()
    assert f" {mount_of(tmp_path).device}:".encode() in place

"""Looks up a path's file system in the kernel's mount table, without starting a process or accessing the disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

MOUNTS = Path("/proc/self/mountinfo")
# Local file system types: only this machine can open their files. All other types are treated as network file systems,
# because mistaking a network file system for a local one could corrupt a store shared by two hosts.
LOCAL = frozenset(
    ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "bcachefs", "jfs", "reiserfs", "nilfs2")
)
_NAMES = {
    "nfs": "NFS", "nfs4": "NFS", "cifs": "CIFS", "smb3": "CIFS", "smbfs": "CIFS", "lustre": "Lustre", "gpfs": "GPFS",
    "beegfs": "BeeGFS", "ceph": "CephFS", "afs": "AFS", "ocfs2": "OCFS2", "gfs2": "GFS2",
}  # fmt: skip


class Mount(NamedTuple):
    """A mounted file system: its type, and its device in the format of `/proc/locks`, such as `fe:01`."""

    kind: str
    device: str

    @property
    def name(self) -> str:
        """The name to show to users, such as `NFS` or `FUSE (sshfs)`."""
        base, _, program = self.kind.partition(".")
        if base in ("fuse", "fuseblk"):
            return f"FUSE ({program})" if program else "FUSE"
        return _NAMES.get(self.kind, self.kind)


def network_file_system(path: Path) -> str | None:
    """Return the name of a path's file system, or None if it is known to be local.

    A store needs a local file system: SQLite's WAL needs memory shared by all processes that use the store, which is
    impossible across hosts.
    """
    try:
        mount = mount_of(path)
    except OSError:
        return "an unknown file system"
    return None if mount.kind in LOCAL else mount.name


def mount_of(path: Path) -> Mount:
    """Return the mount for a path; raise `OSError` if the path or the mount table cannot be read.

    The mount is looked up by its id because on btrfs, the device number from `stat` differs from the one in the mount
    table.
    """
    number = _number(path)
    for line in MOUNTS.read_text(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        if number and left.split()[0] == number:
            major, _, minor = left.split()[2].partition(":")
            return Mount(right.split()[0], f"{int(major):02x}:{int(minor):02x}")
    raise FileNotFoundError(f"the mount of {path} is not listed")


def _number(path: Path) -> str:
    """Return the mount id of a path; "" if the kernel does not report it."""
    flags = os.O_PATH | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags | os.O_DIRECTORY)  # this triggers automounts
    except NotADirectoryError:
        descriptor = os.open(path, flags)
    try:
        about = Path(f"/proc/self/fdinfo/{descriptor}").read_text()
    finally:
        os.close(descriptor)
    return next((line.split()[1] for line in about.splitlines() if line.startswith("mnt_id:")), "")

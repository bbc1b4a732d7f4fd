"""Small files written atomically, and other people's files opened without blocking on a pipe or a device."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.contract.paths import file_mode, open_below

# The beginning of the pointer that git stores in place of a large file until git-lfs fetches it.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# No write takes this long: an older temporary file was left by a process that was killed.
CUT_OFF_AFTER_S = 3600.0
_TEMPORARY = re.compile(r"\.(.{1,40})\.[0-9a-f]{16}", re.DOTALL)


def write_whole(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a file in one step: a reader sees all of it or nothing, even after a power cut.

    Only its owner may read it, unless a group shares the folder. Without `durable` nothing waits for the disk, and a
    power cut may leave an empty file: for what is written every few seconds and may be lost.
    """
    with replacing(path, file_mode(path.parent), durable=durable) as stream:
        stream.write(_encoded(content))


def write_own(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a file in one step whose content is acted on with its writer's rights: a sharing group may only read it.

    One that is not `durable` may be lost with the machine's power, and is written without waiting for the disk.
    """
    with replacing(path, file_mode(path.parent) & ~0o020, durable=durable) as stream:
        stream.write(_encoded(content))


def _encoded(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


@contextlib.contextmanager
def replacing(path: Path, mode: int, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a stream to a new file that replaces `path` once it is complete and on the disk; a link is not followed."""
    # A random name: whoever could guess it could put a link there first.
    temporary = f".{path.name[:40]}.{os.urandom(8).hex()}"
    folder = open_below(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        clear_cut_off(path.parent, path.name)
        with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as stream:
            # Not as the mode of `os.open`: the umask would remove permissions that a group needs.
            os.fchmod(stream.fileno(), mode)
            yield stream
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(folder)
    if durable:
        _sync_names(path.parent)


def _sync_names(folder: Path) -> None:
    """Put the names in a folder on the disk, where its file system can."""
    # The file is in its place already: a folder that may not be read, or cannot be synced, is no reason to fail.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def clear_cut_off(folder: Path, name: str = "") -> None:
    """Remove the temporary files that killed processes of this user left: those of `name`, or all in the folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if match and match[1] == (name[:40] or match[1]) and _is_cut_off(entry.stat(follow_symlinks=False)):
                os.unlink(entry)


def _is_cut_off(status: os.stat_result) -> bool:
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return is_ours and time.time() - status.st_mtime > CUT_OFF_AFTER_S


def open_plain(path: Path) -> io.BufferedReader:
    """Open a file to read; raise `OSError` for a pipe or a device, which might never end, and for a git-lfs pointer."""
    descriptor = open_below(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    stream = open(descriptor, "rb")  # noqa: SIM115 - the caller closes it
    if stream.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
        stream.close()
        raise OSError(errno.EINVAL, "it is a git-lfs pointer and not the file itself; run `git lfs pull`", str(path))
    return stream


def lfs_pointer_in(place: Path) -> Path | None:
    """Return a git-lfs pointer among the files of a folder, or `place` itself if it is one; None without one."""
    with contextlib.suppress(OSError):
        for file in sorted(place.iterdir()) if place.is_dir() else [place]:
            # A pointer is three short lines.
            if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(_LFS_POINTER):
                return file
    return None

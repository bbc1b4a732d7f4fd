"""Writes small files atomically, and opens other users' files without blocking on a pipe or a device."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from trainer.contract.paths import file_mode, open_below

# The first bytes of a pointer file, which git stores in place of a large file until git-lfs fetches it.
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# No write takes this long, so a temporary file older than this was left behind by a killed process.
CUT_OFF_AFTER_S = 3600.0
_TEMPORARY = re.compile(r"\.(.{1,40})\.[0-9a-f]{16}", re.DOTALL)


def write_whole(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Write a file atomically: readers see either the complete file or no file, even after a power cut.

    Only the owner may read the file, unless a group shares the folder. Without `durable`, the call does not wait for
    the disk, and a power cut may leave an empty file; this suits expendable files that are written every few seconds.
    """
    with replacing(path, file_mode(path.parent), durable=durable) as stream:
        stream.write(_encoded(content))


def write_own(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Atomically write a file that controls what programs do on behalf of its owner, such as settings.

    A group that shares the folder may read the file but not change it. Without `durable`, the call does not wait for
    the disk, and a power cut may lose the file.
    """
    with replacing(path, file_mode(path.parent) & ~0o020, durable=durable) as stream:
        stream.write(_encoded(content))


def _encoded(content: bytes | str) -> bytes:
    return content.encode() if isinstance(content, str) else content


@contextlib.contextmanager
def replacing(path: Path, mode: int, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Yield a stream to a temporary file that replaces `path` when the context exits; links are not followed."""
    # Use a random name: if other users could guess it, they could create a link with this name first.
    temporary = f".{path.name[:40]}.{os.urandom(8).hex()}"
    folder = open_below(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        clear_cut_off(path.parent, path.name)
        with open(os.open(temporary, flags, 0o600, dir_fd=folder), "wb") as stream:
            # Set the mode here: if it were passed to `os.open`, the umask would remove permissions that a group needs.
            os.fchmod(stream.fileno(), mode)
            yield stream
            stream.flush()
            if durable and _unsynced.get() is None:
                os.fsync(stream.fileno())
        os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(folder)
    if durable:
        _sync_names(path.parent) if (unsynced := _unsynced.get()) is None else unsynced.append(path)


# The files written in the body of `synced_together`, or None outside it.
_unsynced: ContextVar[list[Path] | None] = ContextVar("_unsynced", default=None)
# Disks complete writes in batches, so several threads wait barely longer than one.
_SYNC_THREADS = 8


@contextlib.contextmanager
def synced_together() -> Iterator[None]:
    """At the end of the body, sync as one batch all files that this thread wrote in it; raise `OSError` on failure.

    Syncing 1,000 files one by one takes 10 s on a busy disk.
    """
    files: list[Path] = []
    token = _unsynced.set(files)
    try:
        yield
    finally:
        _unsynced.reset(token)
    # Imported late because few commands write many files.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_SYNC_THREADS) as threads:
        list(threads.map(_sync, files))
        list(threads.map(_sync_names, dict.fromkeys(file.parent for file in files)))


def _sync(file: Path) -> None:
    descriptor = open_below(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_names(folder: Path) -> None:
    """Flush a folder's entries to disk if the file system supports this."""
    # The file is already in place, so ignore a failure to read or sync the folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def clear_cut_off(folder: Path, name: str = "") -> None:
    """Remove temporary files left in a folder by this user's killed processes; with `name`, only that file's."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY.fullmatch(entry.name)
            if match and match[1] == (name[:40] or match[1]) and _is_cut_off(entry.stat(follow_symlinks=False)):
                os.unlink(entry)


def _is_cut_off(status: os.stat_result) -> bool:
    is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return is_ours and time.time() - status.st_mtime > CUT_OFF_AFTER_S


def open_plain(path: Path) -> io.BufferedReader:
    """Open a file for reading.

    Raise `OSError` for a git-lfs pointer, and for a pipe or device, because reading from one might block forever.
    """
    descriptor = open_below(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    stream = open(descriptor, "rb")  # noqa: SIM115 - the caller closes it
    if stream.peek(len(_LFS_POINTER)).startswith(_LFS_POINTER):
        stream.close()
        raise OSError(errno.EINVAL, "it is a git-lfs pointer, not the file; run `git lfs pull`", str(path))
    return stream


def lfs_pointer_in(place: Path) -> Path | None:
    """Return the first git-lfs pointer in a folder, or `place` itself if it is a pointer; otherwise None."""
    with contextlib.suppress(OSError):
        for file in sorted(place.iterdir()) if place.is_dir() else [place]:
            # A git-lfs pointer consists of three short lines.
            if file.is_file() and file.stat().st_size < 1024 and file.read_bytes().startswith(_LFS_POINTER):
                return file
    return None

"""Small files written whole, and files of strangers read without waiting for them."""

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

from trainer.contract.paths import file_mode

# No write takes as long: what is older was left by a process that was killed.
CUT_OFF_AFTER_S = 3600.0
_TEMPORARY = re.compile(r"\.(.{1,40})\.[0-9a-f]{16}", re.DOTALL)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file in one step: a reader sees all of it or nothing, even after a power cut.

    It is its owner's alone, unless a group shares the folder.
    """
    with replacing(path, file_mode(path.parent)) as stream:
        stream.write(content)


def write_own(path: Path, content: bytes) -> None:
    """The same for what is done as its writer: the group may read it where it shares the folder, and not write."""
    with replacing(path, file_mode(path.parent) & ~0o020) as stream:
        stream.write(content)


@contextlib.contextmanager
def replacing(path: Path, mode: int) -> Iterator[BinaryIO]:
    """A file that takes the place of `path`, and not of what that may link to, once it is whole and on the disk."""
    # Whoever could guess the name could put a link there before us.
    temporary = path.with_name(f".{path.name[:40]}.{os.urandom(8).hex()}")
    clear_cut_off(path.parent, path.name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o600), "wb") as stream:
            # Not by `os.open`, from which the umask would take what a group needs.
            os.fchmod(stream.fileno(), mode)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def clear_cut_off(folder: Path, name: str = "") -> None:
    """Remove what killed processes of this user left of a file in the middle of writing it, or of all in a folder."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if found and found[1] == (name[:40] or found[1]) and _is_cut_off(entry.stat(follow_symlinks=False)):
                os.unlink(entry)


def _is_cut_off(found: os.stat_result) -> bool:
    is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
    return is_ours and time.time() - found.st_mtime > CUT_OFF_AFTER_S


def open_plain(path: Path) -> io.BufferedReader:
    """Open a file to read; raises `OSError` for a pipe or a device, which could be read for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return open(descriptor, "rb")

"""Small files written whole, and logs read from their end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trainer.contract.paths import open_private

_BLOCK = 64 * 1024
_LONGEST_TAIL = 4 * 2**20


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file in one step: a reader sees all of it or nothing, even after a power cut.

    It is its owner's alone, unless a group shares the folder.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(open_private(temporary, os.O_TRUNC), "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def is_gone(folder: Path) -> bool:
    """Whether it was deleted; what a file server answers that is in trouble says nothing of that."""
    try:
        return not stat.S_ISDIR(os.stat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


def tail(path: Path, n_lines: int) -> list[str]:
    """The last lines of a log, read backwards from its end; empty where there is no log."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            length = min(size, _BLOCK)
            while True:
                stream.seek(size - length)
                lines = stream.read(length).removesuffix(b"\n").split(b"\n") if length else []
                if length == size or len(lines) > n_lines or length >= _LONGEST_TAIL:
                    return [_readable(line) for line in lines[-n_lines:]]
                length = min(size, 4 * length)
    except OSError:
        return []


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    return next((line for line in reversed(tail(path, 20)) if line.strip()), "")


class Follower:
    """Hands out what is appended to a log; starts anew when the log is replaced or cut."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._partial = b""

    def new_lines(self) -> list[str]:
        """Complete lines since the last call."""
        try:
            with self.path.open("rb") as stream:
                if stream.seek(0, os.SEEK_END) < self._offset:
                    self._offset, self._partial = 0, b""
                stream.seek(self._offset)
                found = stream.read(_LONGEST_TAIL)
        except OSError:
            return []
        self._offset += len(found)
        *lines, self._partial = (self._partial + found).split(b"\n")
        return [_readable(line) for line in lines]


def _readable(line: bytes) -> str:
    """A progress bar redraws its line with carriage returns: only the last state of it counts."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")

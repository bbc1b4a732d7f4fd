"""Checks whether a folder was deleted, and follows logs as they grow."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trainer.contract.files import open_plain
from trainer.contract.runs import log_tail


def is_gone(folder: Path) -> bool:
    """Return whether a folder was deleted, or False if this is unknown, for example because of a file server error."""
    try:
        return not stat.S_ISDIR(os.stat(folder).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False


class LogFollower:
    """Reads lines as they are appended to a log; starts over if the log is truncated."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._offset = offset
        self._partial = b""

    @classmethod
    def from_end(cls, path: Path, n_lines: int) -> tuple[list[str], LogFollower]:
        """Return the last `n_lines` complete lines of a log, and a follower that continues with the next line."""
        end = log_tail.log_end(path, n_lines)
        follower = cls(path, end.size)
        follower._partial = end.unfinished[-log_tail.LONGEST :]
        return [log_tail.readable(line) for line in end.lines], follower

    @property
    def unfinished(self) -> str:
        """The line that is being written, such as the current state of a progress bar."""
        return log_tail.readable(self._partial)

    def new_lines(self) -> list[str]:
        """Return the complete lines appended since the last call."""
        try:
            with open_plain(self.path) as stream:
                if stream.seek(0, os.SEEK_END) < self._offset:
                    self._offset, self._partial = 0, b""
                stream.seek(self._offset)
                chunk = stream.read(log_tail.LONGEST)
        except OSError:
            return []
        self._offset += len(chunk)
        *lines, partial = (self._partial + chunk).split(b"\n")
        # If a line never ends, keep only its tail.
        self._partial = partial[-log_tail.LONGEST :]
        return [log_tail.readable(line) for line in log_tail.without_redrawn(lines)]

"""Reads new output from a program's log at a bounded cost, even while the log is being shortened."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec

from trainer.contract.files import open_plain
from trainer.contract.store.rows import Count

# At most this many bytes are read per turn, every two seconds, which takes up to 3 % of a core. If much more is unread
# because the program writes faster, only the newest output is read: at 10 MB/s, less than 1 % of it.
MOST_BYTES = 512 * 1024
MOST_UNREAD_BYTES = 4 * 2**20
NEWEST_BYTES = 64 * 1024
# When the program has ended, at most this many bytes are read.
LAST_BYTES = 2**20
_MARK_BYTES = 256
_LONGEST = 16 * 1024
_ENDS = re.compile(rb"[\r\n]")


class LogPosition(msgspec.Struct):
    """How far a log has been read: the offset, the bytes before it as hexadecimal digits, and the number of lines."""

    offset: Count = 0
    mark: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2})*\Z")] = ""
    lines: Count = 0


class OutputReader:
    """Reads complete lines of a log, and each state of a progress bar that is drawn with carriage returns."""

    def __init__(self, file: Path, position: LogPosition) -> None:
        self._file, self.position = file, position
        self._seen: tuple[int, int] | None = None
        self._has_more = False
        # Whether output was skipped since the start.
        self.has_skipped = False

    def read(self, *, is_last: bool = False) -> list[tuple[int, str]]:
        """Return the next lines with their numbers; if `is_last`, also return an unfinished last line."""
        try:
            # If nothing is new, one system call is enough; opening the file without following links takes ten.
            if not (is_last or self._has_more) and _seen(os.stat(self._file, follow_symlinks=False)) == self._seen:
                return []
            with open_plain(self._file) as stream:
                status = os.fstat(stream.fileno())
                self._seen = _seen(status)
                chunk = self._next(stream, status.st_size, is_last)
                self._has_more = len(chunk) == MOST_BYTES
                return list(self._lines(chunk, is_last))
        except OSError:
            return []

    def _next(self, stream: BinaryIO, size: int, is_last: bool) -> bytes:
        """Return the next bytes; if far too many are unread, skip to the newest ones."""
        place = self.position
        if not self._is_at_mark(stream, size):
            place.offset = self._find_mark(stream, size)
        if size - place.offset > (LAST_BYTES if is_last else MOST_UNREAD_BYTES):
            self.has_skipped = True
            most = LAST_BYTES if is_last else NEWEST_BYTES
            stream.seek(size - most)
            chunk = stream.read(most)
            cut = _ENDS.search(chunk)
            skipped = chunk[: cut.end()] if cut else b""
            place.offset, place.mark = size - most + len(skipped), skipped[-_MARK_BYTES:].hex()
            return chunk[len(skipped) :]
        stream.seek(place.offset)
        return stream.read(LAST_BYTES if is_last else MOST_BYTES)

    def _is_at_mark(self, stream: BinaryIO, size: int) -> bool:
        """Return whether the bytes before the position are unchanged since they were read."""
        place, mark = self.position, bytes.fromhex(self.position.mark)
        if place.offset > size:
            return False
        stream.seek(place.offset - len(mark))
        return stream.read(len(mark)) == mark

    def _find_mark(self, stream: BinaryIO, size: int) -> int:
        """Return the read position in a log that was shortened, or the log's end if the text read last is not found.

        A short log without this text is a new one, so it is read from its start.
        """
        start = max(0, size - MOST_UNREAD_BYTES)
        stream.seek(start)
        mark = bytes.fromhex(self.position.mark)
        found = stream.read(MOST_UNREAD_BYTES).rfind(mark) if mark else -1
        if found >= 0:
            return start + found + len(mark)
        self.position.mark = ""
        return size if size > LAST_BYTES else 0

    def _lines(self, chunk: bytes, is_last: bool) -> Iterator[tuple[int, str]]:
        begin = 0
        for end in _ENDS.finditer(chunk):
            if end.start() > begin:
                yield self.position.lines, _decoded(chunk[begin : end.start()])
            self.position.lines += end[0] == b"\n"
            begin = end.end()
        rest = chunk[begin:]
        # A progress bar that ends with a bracket is complete, even if the next carriage return has yet to come.
        if rest and (is_last or len(rest) > _LONGEST or rest.rstrip().endswith(b"]")):
            yield self.position.lines, _decoded(rest)
            begin = len(chunk)
        self.position.offset += begin
        before = bytes.fromhex(self.position.mark)
        self.position.mark = (before + chunk[:begin])[-_MARK_BYTES:].hex()


def _seen(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _decoded(line: bytes) -> str:
    return line[: _LONGEST + 1].decode(errors="replace")

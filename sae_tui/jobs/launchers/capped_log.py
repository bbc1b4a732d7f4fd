"""Keeps a program's log small by removing its middle when it exceeds its limit."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from sae_tui.jobs.supervisor_log import tolerate_disk
from trainer.contract.files import open_plain
from trainer.contract.wording import gibibytes

# How many bytes are kept at the start and at the end of the log.
KEPT_BYTES = 2**20
CHECK_EVERY_S = 1.0


class CappedLog:
    """A log that a program appends to without knowing its limit.

    The program writes to the file itself, not through this process, so it does not depend on this process.
    """

    def __init__(self, file: Path, limit_bytes: int) -> None:
        self._file, self._limit = file, max(limit_bytes, 4 * KEPT_BYTES)
        self.removed_bytes = 0
        self._check_at = 0.0

    def turn(self) -> None:
        """Check the log about once per second."""
        if time.monotonic() >= self._check_at:
            self._check_at = time.monotonic() + CHECK_EVERY_S
            self.check()

    def check(self) -> int:
        """If the log exceeds its limit, remove its middle; return how many bytes were removed."""
        removed = 0
        with tolerate_disk(f"shortening {self._file}"), contextlib.suppress(FileNotFoundError):
            if self._file.stat().st_size > self._limit:
                removed = self._shorten()
        self.removed_bytes += removed
        return removed

    def _shorten(self) -> int:
        """Truncate the log after its start, then append a message and the former end.

        The program may append lines in the meantime. Lines written in the microseconds between the last read and the
        truncation are lost, and lines written between the truncation and the message appear before older lines.
        """
        with open_plain(self._file) as stream:
            head = stream.read(KEPT_BYTES)
            cut = head.rfind(b"\n") + 1 or len(head)
            end = stream.seek(0, os.SEEK_END)
            start = stream.seek(end - KEPT_BYTES)
            tail = stream.read()
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                tail += stream.read()
                os.ftruncate(descriptor, cut)
                first = tail.find(b"\n") + 1
                removed = start + first - cut
                limit = gibibytes(self._limit)
                message = (
                    f"[sae-tui removed {gibibytes(removed)} here: the log reached command.log_limit_mib, {limit}]\n"
                )
                # The program may have written half a line in the meantime, so start a new line.
                os.write(descriptor, b"\n" + message.encode() + tail[first:])
            finally:
                os.close(descriptor)
        return removed

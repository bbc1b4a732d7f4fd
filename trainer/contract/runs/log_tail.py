"""Logs read from their end."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.contract.files import open_plain

_BLOCK = 64 * 1024
LONGEST = 4 * 2**20


def tail(path: Path, n_lines: int) -> list[str]:
    """Return the last `n_lines` lines of a log, read backwards from its end; empty where there is no log."""
    try:
        with open_plain(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            length = min(size, _BLOCK)
            while True:
                stream.seek(size - length)
                lines = stream.read(length).removesuffix(b"\n").split(b"\n") if length else []
                if length == size or len(lines) > n_lines or length >= LONGEST:
                    return [readable(line) for line in lines[-n_lines:]]
                length = min(size, 4 * length)
    except OSError:
        return []


def last_line(path: Path) -> str:
    """Return the last line of a log that is not blank; "" without one."""
    return next((line for line in reversed(tail(path, 20)) if line.strip()), "")


def readable(line: bytes) -> str:
    """Decode a line; of a progress bar, which redraws its line with carriage returns, keep only the last state."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")

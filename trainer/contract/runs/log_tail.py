"""Reads the last lines of log files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.contract.files import open_plain

_BLOCK = 64 * 1024
# PyTorch prints two stack traces of about 30 frames each; every line of a stack trace matches `_FRAME`.
_STACK_LINES = 200
_FRAME = re.compile(
    r"\s*(\[rank\d+\]:)?\s*(frame #\d+|Fatal Python error: Aborted|Extension modules:|Current thread|Thread 0x|File \")"
)
_REASON = re.compile(r"\bwhat\(\): |Watchdog caught|watchdog got stuck|Heartbeat monitor timed out")
LONGEST = 4 * 2**20
# The maximum number of bytes to consider at the end of a line that a progress bar has redrawn.
_LONGEST_REDRAWN = 64 * 1024
# Escape sequences: `_UP` moves the cursor up, and `_ERASE` erases the line, either from the cursor onwards or
# completely.
_UP, _ERASE, _ERASE_ALL = b"\x1b[A", re.compile(rb"\x1b\[[02]?K"), b"\x1b[2K"


class LogEnd(NamedTuple):
    """The end of a log: its last complete lines, the unfinished line after them, and the length of the log."""

    lines: list[bytes] = []
    unfinished: bytes = b""
    size: int = 0


def tail(path: Path, n_lines: int) -> list[str]:
    """Return the last `n_lines` lines of a log, or [] if there is no log, without reading the rest of the log."""
    if n_lines <= 0:
        return []
    end = log_end(path, n_lines)
    lines = [*end.lines, *filter(None, [end.unfinished])]
    return [readable(line) for line in lines[-n_lines:]]


def log_end(path: Path, n_lines: int) -> LogEnd:
    """Return the end of a log, with its last `n_lines` lines, without reading the rest of the log."""
    try:
        with open_plain(path) as stream:
            size = stream.seek(0, os.SEEK_END)
            length = min(size, _BLOCK)
            while True:
                stream.seek(size - length)
                *lines, unfinished = stream.read(length).split(b"\n")
                kept = without_redrawn(lines)
                if length == size or len(kept) > n_lines or length >= LONGEST:
                    return LogEnd(kept[-n_lines:], unfinished, size)
                length = min(size, 4 * length)
    except OSError:
        return LogEnd()


def without_redrawn(lines: Sequence[bytes]) -> list[bytes]:
    """Leave out lines after which the cursor moves up: the next line is drawn over them, as in nested progress bars."""
    return [line for line in lines if not line.endswith(_UP)]


def last_line(path: Path) -> str:
    """Return the last non-blank line of a log, or "".

    If the log ends with the stack trace of a C++ abort, return the line with the reason instead.
    """
    lines = [line for line in tail(path, _STACK_LINES) if line.strip()]
    if not lines or not _FRAME.match(lines[-1]):
        return lines[-1] if lines else ""
    spoken = [line for line in lines if not _FRAME.match(line)]
    at = next((at for at in reversed(range(len(spoken))) if _REASON.search(spoken[at])), len(spoken) - 1)
    reason, after = spoken[at] if spoken else lines[-1], spoken[at + 1 :]
    # NCCL prints the cause on a separate line.
    cause = next((after[i + 1] for i, line in enumerate(after[:-1]) if line.strip() == "Last error:"), "")
    return f"{reason.strip()}: {cause.strip()}" if cause else reason.strip()


def readable(line: bytes) -> str:
    """Decode a line; if a progress bar has redrawn it with carriage returns, return what a terminal shows at the end.

    If a text is shorter than the text that it overwrites, the rest of the old text stays visible, unless the line is
    erased.
    """
    if b"\r" not in line:
        return line.decode(errors="replace")
    shown = ""
    for state in reversed(line[-_LONGEST_REDRAWN:].split(b"\r")):
        if state.endswith(_UP):
            continue  # This text is on another line.
        before, is_erased, after = state.rpartition(_ERASE_ALL)
        texts = [_ERASE.sub(b"", one).replace(b"\0", b"").decode(errors="replace") for one in (before, after)]
        # The cursor stays where it is if the entire line is erased.
        text = " " * len(texts[0]) + texts[1] if is_erased else texts[1]
        shown += text[len(shown) :]
        if _ERASE.search(state):
            break
    return shown.rstrip(" ")

"""Reads the last lines of log files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from trainer.contract.files import open_plain

_BLOCK = 64 * 1024
# PyTorch prints two stack traces of about 30 frames each; every line of a stack trace matches this pattern.
_STACK_LINES = 200
_FRAME = re.compile(
    r"\s*(\[rank\d+\]:)?\s*(frame #\d+|Fatal Python error: Aborted|Extension modules:|Current thread|Thread 0x|File \")"
)
_REASON = re.compile(r"\bwhat\(\): |Watchdog caught|watchdog got stuck|Heartbeat monitor timed out")
LONGEST = 4 * 2**20


def tail(path: Path, n_lines: int) -> list[str]:
    """Return the last `n_lines` lines of a log, or [] if there is no log; read only the end of the log."""
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
    """Decode a line; if a progress bar has redrawn the line with carriage returns, keep only its last state."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")

"""Reads a process's /proc files with a time limit.

The kernel locks a process's memory map while its command line or environment is read. A process hung in a driver may
hold this lock forever and block the reader.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path

LIMIT_S = 0.5
_MOST_BYTES = 1 << 18
_THREAD_NAME = "proc-file"
# Unfinished reads, each with the monotonic time until which callers wait for it.
_under_way: dict[Path, tuple[Future[bytes], float]] = {}
_guard = threading.Lock()


def read_file(path: Path, limit_s: float = LIMIT_S) -> bytes:
    """Return the first 256 KiB of a file; raise `OSError` if it cannot be read, or `TimeoutError` if the read hangs.

    Concurrent calls for the same file share one read and its time limit, so there is at most one thread per file.
    """
    with _guard:
        is_new = path not in _under_way
        answer, deadline = _under_way.setdefault(path, (Future(), time.monotonic() + limit_s))
    if is_new:
        threading.Thread(target=_read, args=(path, answer), name=_THREAD_NAME, daemon=True).start()
    return answer.result(max(0.0, deadline - time.monotonic()))


def _read(path: Path, answer: Future[bytes]) -> None:
    content, failure = b"", None
    try:
        with path.open("rb", buffering=0) as file:
            content = file.read(_MOST_BYTES) or b""
    except Exception as error:
        failure = error
    with _guard:
        del _under_way[path]
    if failure is None:
        answer.set_result(content)
    else:
        answer.set_exception(failure)


def arguments_of(pid: int) -> list[str]:
    """Return a process's command line, or the program's name (up to 15 characters) if it cannot be read."""
    folder = Path(f"/proc/{pid}")
    try:
        text = os.fsdecode(read_file(folder / "cmdline")).rstrip("\0")
    except OSError:
        text = ""
    if not text:
        return [os.fsdecode((folder / "comm").read_bytes()).rstrip("\n")]
    # A program that sets its own title separates the words with spaces instead of NUL.
    return text.split("\0") if "\0" in text else text.split(" ")

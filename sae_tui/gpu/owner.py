"""Looks up the user and command line for a process on a GPU; vendors' drivers report only its pid."""

from __future__ import annotations

import contextlib
import os.path
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sae_tui.gpu.base import GpuProcess, ProcessKind
from sae_tui.gpu.proc_files import arguments_of
from sae_tui.gpu.secrets import masked_arguments
from trainer.contract.printable import on_one_line, printable
from trainer.contract.process import ancestors_of

if TYPE_CHECKING:
    import psutil

Owner = tuple[str | None, str | None]
# Owners are cached for this long because reading a process's owner takes 0.4 ms and requires a new thread.
_REUSED_S = 10.0
_MOST_KNOWN = 4096
# Cached owners by pid and start time, each with the monotonic time at which it expires.
_known: dict[tuple[int, float], tuple[Owner, float]] = {}


def process_on_gpu(pid: int, memory_used_bytes: int | None, kind: ProcessKind | None = None) -> GpuProcess:
    """Return a process listed by a driver, with its owner and its ancestors; reading each of the two takes 15 µs."""
    return GpuProcess(pid, *owner(pid), memory_used_bytes, ancestors_of(pid), kind)


def owner(pid: int) -> Owner:
    """Return a process's user and command line; each is None if unknown, for example because the process has exited."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        process, now = psutil.Process(pid), time.monotonic()
        key = (pid, process.create_time())
        known, until = _known.get(key, ((None, None), now))
        if now < until:
            return known
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        found = _read(process)
        if None not in found:
            _known[key] = found, now + _REUSED_S
        return found
    return None, None


def _read(process: psutil.Process) -> Owner:
    import psutil

    user = name = None
    with contextlib.suppress(psutil.Error, OSError):
        user = printable(str(process.username()))
        name = on_one_line(command_line(arguments_of(process.pid)))
    return user, name


def command_line(arguments: Iterable[str], most: int | None = 200) -> str:
    """Return the command line with secrets masked and the program's folder removed, truncated to `most` characters."""
    program, *rest = (*arguments,) or ("",)
    # Mask before truncating because a truncated secret would not be recognised.
    return " ".join(masked_arguments([os.path.basename(program), *rest]))[:most]

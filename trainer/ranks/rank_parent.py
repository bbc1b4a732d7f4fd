"""A rank's witness: its parent process on a host that who started the run cannot look into.

srun's own exit code says neither which rank failed nor whether it stopped; a rank that is killed says nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import msgspec

from trainer.contract.process import ProcessRef, boot_id
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from trainer.contract.runs.remote_rank_status import RankMark, write_mark

_AWAITED = {signal.SIGTERM, signal.SIGCHLD}


def witnessed(mark_file: Path) -> None:
    """Return in a child, which is the rank; this process stays its parent and ends with it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    if child := os.fork():
        _watch(child, mark_file)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(child: int, mark_file: Path) -> None:
    """Pass SIGTERM on until the rank has ended; never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = ProcessRef.of(child) or ProcessRef(child, 0, boot_id())
    mark = RankMark(socket.gethostname(), process)
    _leave(mark_file, mark)
    code = _ended(child, process)
    killed = code < 0
    how = {"exit_code": None if killed else code, "exit_signal": -code if killed else None}
    _leave(mark_file, msgspec.structs.replace(mark, **how))
    # To srun a rank that stopped would be one that failed, for which it ends the others before they have saved.
    os._exit(EXIT_FINISHED if code in (EXIT_FINISHED, EXIT_STOPPED) else EXIT_FAILED)


def _ended(child: int, process: ProcessRef) -> int:
    while True:
        if signal.sigwait(_AWAITED) == signal.SIGTERM:
            process.send(signal.SIGTERM)
            continue
        # Whom SLURM stops and lets go on again also makes a SIGCHLD.
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)


def _leave(mark_file: Path, mark: RankMark) -> None:
    with contextlib.suppress(OSError):
        write_mark(mark_file, mark)

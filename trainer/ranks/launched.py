"""Runs a rank started by srun on a cluster node; the rank reports to the supervisor through files in the run folder."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from pathlib import Path

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.paths import RunPaths, open_private
from trainer.contract.process import STOP_SIGNALS, ProcessRef, boot_id
from trainer.contract.runs.checkpoint_manifest import newest_whole
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, RankSpec, srun_environment
from trainer.contract.runs.remote_rank_status import RankMark, write_mark
from trainer.ranks import staging
from trainer.ranks.rank import end_with_parent, run

_AWAITED = {*STOP_SIGNALS, signal.SIGCHLD}


def join_launched(spec: RankSpec) -> int:
    """Run this process as the rank that srun assigned, and return its exit code.

    If the cluster restarts the job, resume from the newest checkpoint.
    """
    os.environ.update(srun_environment(spec))
    rank, paths = int(os.environ["RANK"]), RunPaths(spec.run_dir)
    _write_to(paths.log(rank))
    end_with_parent()
    if not staging.is_staged():
        # A rank that restarted itself already has a parent watching it.
        fork_rank(paths.rank_mark(spec.attempt, rank))
    resume_from = spec.resume_from or newest_checkpoint(paths)
    return run(msgspec.structs.replace(spec, resume_from=resume_from), rank)


def newest_checkpoint(paths: RunPaths) -> Path | None:
    """Return the newest complete checkpoint, or None.

    All ranks find the same checkpoint, because no rank writes before all ranks have joined the process group.
    """
    try:
        return newest_whole(paths.checkpoints)
    except UserError:
        return None


def _write_to(log: Path) -> None:
    """Redirect all output from this process to a log file, including output from libraries that bypass Python."""
    descriptor = open_private(log, os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def fork_rank(mark_file: Path) -> None:
    """Fork, and return in the child (the rank); the parent waits, records how the child exited, and exits.

    The supervisor cannot see processes on other hosts. srun's exit code shows neither which rank failed nor whether it
    stopped, and a killed rank cannot write a record.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    if child := os.fork():
        _watch(child, mark_file)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(child: int, mark_file: Path) -> None:
    """Wait for the rank, forwarding `STOP_SIGNALS`, record its exit code and exit; never return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    process = ProcessRef.of(child) or ProcessRef(child, 0, boot_id())
    mark = RankMark(socket.gethostname(), process)
    _write_mark(mark_file, mark)
    code = _wait_for_exit(child, process)
    killed = code < 0
    how = {"exit_code": None if killed else code, "exit_signal": -code if killed else None}
    _write_mark(mark_file, msgspec.structs.replace(mark, **how))
    # srun treats a stopped rank's exit code as a failure and would kill the other ranks before they have saved.
    os._exit(EXIT_FINISHED if code in (EXIT_FINISHED, EXIT_STOPPED) else EXIT_FAILED)


def _wait_for_exit(child: int, process: ProcessRef) -> int:
    """Wait for the rank, forwarding `STOP_SIGNALS`, and return its exit code, or -N if signal N killed it."""
    while True:
        if signal.sigwait(_AWAITED) in STOP_SIGNALS:
            process.send(signal.SIGTERM)
            continue
        # SIGCHLD also arrives when SLURM suspends or resumes the rank.
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)


def _write_mark(mark_file: Path, mark: RankMark) -> None:
    """Write the mark; ignore disk errors, because they must not stop the rank."""
    with contextlib.suppress(OSError):
        write_mark(mark_file, mark)

"""Starts the processes of ranks, also before their job's turn, so that they have imported torch by then."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.contract.machine_memory import available_bytes
from trainer.contract.paths import RunPaths
from trainer.contract.prctl import end_with_parent
from trainer.contract.process import STOP_SIGNALS
from trainer.contract.runs.grant import CHANNEL, send_grant
from trainer.contract.runs.rank_spec import RankSpec, rank_command, rank_environment

# The memory that must be available for each rank that starts early. Importing torch takes about 0.25 GiB.
NEEDED_BYTES = 2 * 2**30
_GRANT_LIMIT_S, _DEATH_LIMIT_S = 10.0, 1.0
# A larger environment, in characters, would not fit into the socket's buffer, so that each rank would be waited for.
_LARGEST_ENVIRONMENT = 100_000


def start_rank(
    argv: Sequence[str], environment: Mapping[str, str], output: int, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Start a rank, which inherits the descriptors and is ended by the kernel when this process dies."""
    supervisor = os.getpid()
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd="/",
        env=environment,
        pass_fds=descriptors,
        preexec_fn=lambda: _die_with(supervisor),
    )


def _die_with(supervisor: int) -> None:
    """Make the kernel send SIGTERM to this rank when the supervisor dies; exit if the supervisor has already died.

    This function runs in the rank's process before the rank's program is executed.
    """
    # Reset the signal handlers because the supervisor's handlers are inherited until the program is executed.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    end_with_parent(supervisor)


class EarlyRanks:
    """The ranks of a queued job, which import torch before the job's turn.

    They read nothing else, see no GPUs, and exit when this process closes their channels or dies.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[subprocess.Popen[bytes], socket.socket]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def start(self, spec: RankSpec, command: Callable[[Path], Sequence[str]] = rank_command) -> None:
        """Start one process per rank, unless the machine has too little memory."""
        if available_bytes() < NEEDED_BYTES * spec.n_processes:
            return
        argv = command(RunPaths(spec.run_dir).rank_spec(spec.attempt))
        for rank in range(spec.n_processes):
            ours, theirs = socket.socketpair()
            # A rank that is still importing torch reads nothing.
            ours.settimeout(_GRANT_LIMIT_S)
            environment = rank_environment(spec, rank) | {CHANNEL: str(theirs.fileno())}
            with theirs:
                process = start_rank(argv, environment, subprocess.DEVNULL, [theirs.fileno()])
            self._waiting[rank] = process, ours

    def take(
        self, rank: int, argv: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> subprocess.Popen[bytes] | None:
        """Give a rank its turn; return its process, or None if there is none or it has died."""
        process, channel = self._waiting.pop(rank, (None, None))
        if process is None or channel is None:
            return None
        with contextlib.suppress(OSError):
            is_small = sum(map(len, itertools.chain(environment, environment.values()))) < _LARGEST_ENVIRONMENT
            if is_small and process.poll() is None and process.args == argv:
                send_grant(channel, environment, descriptors)
                return process
        _end(process, channel)
        return None

    def end(self) -> None:
        """End all ranks that have not had their turn."""
        while self._waiting:
            _end(*self._waiting.popitem()[1])


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    channel.close()
    process.kill()
    # A rank that imports from a file server that hangs does not die. It exits later, because its channel is closed.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_DEATH_LIMIT_S)

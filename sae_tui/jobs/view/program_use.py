"""Reads what a command's processes use now, and how its GPUs were used while it ran."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from sae_tui.gpu.window import Window, stored_window
from sae_tui.jobs.launchers.process_tree import ProcessTree
from sae_tui.jobs.machine import is_here
from sae_tui.jobs.program_environment import ProgramEnvironment, active_environment
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.store.rows import Job, Rank

# The number of time steps in a history; a panel draws as many columns as fit.
N_STEPS = 120
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProgramUse(msgspec.Struct, frozen=True):
    """A command's use of this machine.

    `n_processes` is 0 if none of its processes is alive here; `cpu_percent` is relative to one core, and None until the
    second reading. `gpus` pairs the index of each of its GPUs with that GPU's history while the command ran.
    `environment` is the virtual environment that was active when it was launched, or "".
    """

    n_processes: int = 0
    cpu_percent: float | None = None
    memory_bytes: int = 0
    gpus: tuple[tuple[int, Window], ...] = ()
    environment: str = ""


class ProgramReader:
    """Reads one command's use of this machine; CPU time is compared with the previous reading.

    Call it from a separate thread, because reading from `/proc` or a disk may hang.
    """

    def __init__(self, data: DataDir, job_id: int) -> None:
        self._data, self._paths = data, data.run(job_id)
        self._cpu_s: dict[ProcessRef, float] = {}
        self._read_at = 0.0

    def read(self, job: Job, ranks: Iterable[Rank]) -> ProgramUse:
        stored = ProgramEnvironment.read(self._paths)
        environment = active_environment(dict(stored.variables)) if stored else ""
        if not is_here(job):
            return ProgramUse(environment=environment)
        return msgspec.structs.replace(self._processes(job, ranks), gpus=self._gpus(job), environment=environment)

    def _processes(self, job: Job, ranks: Iterable[Rank]) -> ProgramUse:
        living = [
            rank.pid for rank in ranks if rank.attempt == job.attempt and not rank.ended and rank.process.is_alive()
        ]
        if not living or job.state.is_final:
            return ProgramUse()
        tree = ProcessTree(living[0], self._paths.root, reaper=job.supervisor_pid)
        before, since, now = self._cpu_s, self._read_at, time.monotonic()
        used = {ref: use for ref in tree.living() if (use := _use(ref.pid))}
        self._cpu_s, self._read_at = {ref: cpu_s for ref, (cpu_s, _) in used.items()}, now
        # A process that started since the last reading has used all its CPU time since then.
        spent_s = sum(cpu_s - before.get(ref, 0.0) for ref, cpu_s in self._cpu_s.items())
        cpu = 100 * spent_s / (now - since) if before and now > since else None
        return ProgramUse(len(used), cpu, sum(memory for _, memory in used.values()))

    def _gpus(self, job: Job) -> tuple[tuple[int, Window], ...]:
        if job.started is None:
            return ()
        end = job.ended or time.time()
        path, host, span_s = self._data.gpu_db, socket.gethostname(), max(float(N_STEPS), end - job.started)
        with contextlib.suppress(UserError):
            return tuple(
                (index, stored_window(path, host, uuid, span_s, N_STEPS, end))
                for index, uuid in zip(job.gpu_ids, job.gpu_uuids, strict=False)
            )
        return ()


def _use(pid: int) -> tuple[float, int] | None:
    """Return a process's CPU time in seconds and its resident memory in bytes, or None if it has exited."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[21]) * _PAGE_BYTES
    return None

"""Measures the CPU time and memory of a command's processes, and reads how its GPUs are used."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from sae_tui.gpu.stored import recent
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.process import ProcessRef
from trainer.contract.settings.series import CPU_PERCENT, GPU_MEMORY, GPU_PERCENT, HOST_MEMORY

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessUsage:
    """Measures the CPU use since the last measurement, and the memory in use, summed over processes."""

    def __init__(self) -> None:
        self._ticks: dict[ProcessRef, int] = {}
        self._at = time.monotonic()

    def measure(self, processes: Iterable[ProcessRef]) -> dict[str, float]:
        """Return the values by series name, or {} if no process could be read."""
        now, ticks, memory_bytes = time.monotonic(), dict[ProcessRef, int](), 0
        for process in processes:
            with contextlib.suppress(OSError, IndexError, ValueError):
                ticks[process], used = _ticks_and_memory(process.pid)
                memory_bytes += used
        # All CPU time of a new process counts, because the process has started since the last measurement.
        spent = sum(max(0, count - self._ticks.get(process, 0)) for process, count in ticks.items())
        passed_s, self._at, self._ticks = now - self._at, now, ticks
        if not ticks or passed_s <= 0:
            return {}
        return {CPU_PERCENT: 100 * spent / _TICKS_PER_S / passed_s, HOST_MEMORY: float(memory_bytes)}


def _ticks_and_memory(pid: int) -> tuple[int, int]:
    """Return a process's CPU time in clock ticks, and its resident memory in bytes."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return int(fields[11]) + int(fields[12]), int(fields[21]) * _PAGE_BYTES


def gpu_usage(data: DataDir, host: str, uuids: Sequence[str], since: float) -> dict[str, float]:
    """Return a job's mean GPU utilisation, and the most memory used on one GPU, from samples stored since `since`."""
    used, memory = [], []
    with contextlib.suppress(UserError):
        stored = recent(data.gpu_db, host, max(0.0, time.time() - since)) if uuids else {}
        for reading in (reading for uuid in uuids for reading in stored.get(uuid, ())):
            used += [reading.utilization] if reading.utilization is not None else []
            memory += [reading.memory_used_bytes] if reading.memory_used_bytes is not None else []
    busy = {GPU_PERCENT: statistics.fmean(used)} if used else {}
    return busy | ({GPU_MEMORY: float(max(memory))} if memory else {})

"""What is read of a card only while somebody looks at it: clocks, links, faults, and its processes one by one.

Loaded only then: a waiting supervisor has no use for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sae_tui.gpu.base import GpuProcess


@dataclass(frozen=True, slots=True)
class ProcessDetails:
    """A process on a card; `started` is seconds since the epoch, percents are of one core and of all of the card."""

    pid: int
    user: str | None
    command: str | None
    memory_used_bytes: int | None
    sm_percent: int | None = None
    cpu_percent: float | None = None
    host_memory_bytes: int | None = None
    started: float | None = None


@dataclass(frozen=True, slots=True)
class GpuDetails:
    """One reading of a card's particulars; `None` means "this sensor is not supported".

    `slowed_by` says in words what keeps the clocks down; empty while nothing does. Energy is since the driver was
    loaded, errors of the memory since it was reset.
    """

    timestamp: float
    processes: tuple[ProcessDetails, ...] = ()
    memory_bandwidth_percent: int | None = None
    memory_reserved_bytes: int | None = None
    sm_clock_mhz: int | None = None
    most_sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    most_memory_clock_mhz: int | None = None
    performance_state: int | None = None
    slowed_by: tuple[str, ...] | None = None
    slowdown_c: int | None = None
    fan_percent: int | None = None
    energy_j: float | None = None
    pcie_generation: int | None = None
    most_pcie_generation: int | None = None
    pcie_width: int | None = None
    most_pcie_width: int | None = None
    pcie_received_bytes_s: float | None = None
    pcie_sent_bytes_s: float | None = None
    nvlinks: int | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    remapped_rows: int | None = None
    remapping_failed: bool | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    persistence: bool | None = None
    compute_mode: str | None = None
    bus_id: str | None = None


class ProcessReader:
    """Reads of each process of a card what the operating system knows; keeps them, since a share of CPU takes two."""

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}

    def read(self, processes: Iterable[GpuProcess], sm_percents: Mapping[int, int]) -> tuple[ProcessDetails, ...]:
        """Return the processes with their share of the card's multiprocessors, those that hold most memory first."""
        import psutil

        found = sorted(processes, key=lambda one: -(one.memory_used_bytes or 0))
        known = {one.pid: self._known.get(one.pid) for one in found}
        for pid, process in known.items():
            with contextlib.suppress(psutil.Error, OSError):
                # A process that took over the number of one that has ended is another.
                known[pid] = process if process is not None and process.is_running() else psutil.Process(pid)
        self._known = known
        return tuple(_details(one, known[one.pid], sm_percents.get(one.pid)) for one in found)


def _details(process: GpuProcess, of_host: Any, sm_percent: int | None) -> ProcessDetails:
    import psutil

    cpu = memory = started = None
    if of_host is not None:
        with contextlib.suppress(psutil.Error, OSError), of_host.oneshot():
            started, cpu, memory = of_host.create_time(), of_host.cpu_percent(), of_host.memory_info().rss
    return ProcessDetails(
        process.pid, process.user, process.name, process.memory_used_bytes, sm_percent, cpu, memory, started
    )

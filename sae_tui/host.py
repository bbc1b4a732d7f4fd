"""Reads this machine's load: CPU, memory, disks and network. The load is read only while it is displayed."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

from trainer.contract.machine_memory import machine_memory

# A CPU share measured over a shorter interval is too noisy.
LEAST_S = 0.9


@dataclass(frozen=True, slots=True)
class HostLoad:
    """One reading of the machine's load. `cpu_percent` is relative to all cores; unknown values are None."""

    cpu_percent: float | None = None
    load: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    disk_bytes_s: float | None = None
    network_bytes_s: float | None = None


NOT_READ = HostLoad()


class Host:
    """Reads the machine's load at most about once per second; rates cover the time since the previous reading."""

    def __init__(self) -> None:
        self._load = HostLoad()
        self._read_at = 0.0
        self._moved: tuple[int | None, int | None] = (None, None)

    def load(self) -> HostLoad:
        """Return the latest reading, or a new one if the latest is at least `LEAST_S` seconds old."""
        now = time.monotonic()
        if now - self._read_at >= LEAST_S:
            self._load = self._read(now - self._read_at if self._read_at else None)
            self._read_at = now
        return self._load

    def _read(self, elapsed_s: float | None) -> HostLoad:
        # Importing psutil takes 15 ms, so import it at the first reading, after the first frame.
        import psutil

        before, self._moved = self._moved, _bytes_moved()
        disk, network = (
            None if elapsed_s is None or was is None or is_now is None else max(0, is_now - was) / elapsed_s
            for was, is_now in zip(before, self._moved, strict=True)
        )
        cpu = psutil.cpu_percent()
        memory = used = swap = None
        with contextlib.suppress(OSError, KeyError, ValueError):
            available, memory = machine_memory()
            used = memory - available
            swap = int(psutil.swap_memory().used)
        # The first reading has no CPU value, because a value covers the interval between two readings.
        return HostLoad(None if elapsed_s is None else cpu, os.getloadavg()[0], used, memory, swap, disk, network)


def _bytes_moved() -> tuple[int | None, int | None]:
    """Return the number of bytes moved by disks and network interfaces since boot, excluding the loopback interface."""
    import psutil

    disk = network = None
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        disks = psutil.disk_io_counters()
        disk = None if disks is None else disks.read_bytes + disks.write_bytes
        links = psutil.net_io_counters(pernic=True)
        network = sum(link.bytes_sent + link.bytes_recv for name, link in links.items() if name != "lo")
    return disk, network

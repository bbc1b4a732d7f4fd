"""Reads this machine's memory size without a library, because queue processes and ranks must use little memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple


class MachineMemory(NamedTuple):
    """The machine's memory in bytes: the memory available to new processes without swapping, and the total."""

    available_bytes: int
    total_bytes: int


def machine_memory() -> MachineMemory:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name.rstrip(":"): 1024 * int(value) for name, value, *_ in lines}
    return MachineMemory(sizes["MemAvailable"], sizes["MemTotal"])


def available_bytes(mount: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the memory available to new processes: on the machine and, with cgroup v2, within this process's limits.

    Within a limit, cached files count as used, so the result may be too low.
    """
    available = machine_memory().available_bytes
    with contextlib.suppress(OSError):
        name = own.read_text().strip().rpartition("0::")[2].lstrip("/")
        for folder in (mount / name, *(mount / name).parents):
            with contextlib.suppress(OSError, ValueError):
                limit, used = (int((folder / file).read_text()) for file in ("memory.max", "memory.current"))
                available = min(available, limit - used)
    return available

"""Reads this machine's memory size without a library, because queue processes and ranks must use little memory."""

from __future__ import annotations

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

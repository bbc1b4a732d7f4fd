"""Reads this machine's memory without a library, since waiting supervisors and ranks read it too."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class MachineMemory(NamedTuple):
    """The bytes available to new processes without swapping, and the total bytes."""

    available_bytes: int
    total_bytes: int


def machine_memory() -> MachineMemory:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name.rstrip(":"): 1024 * int(value) for name, value, *_ in lines}
    return MachineMemory(sizes["MemAvailable"], sizes["MemTotal"])

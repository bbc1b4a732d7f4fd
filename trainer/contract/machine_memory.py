"""The memory of this machine, without a library: a waiting supervisor and a rank ask for it too."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class MachineMemory(NamedTuple):
    """What the machine could give to new processes without swapping, and has in all, in bytes."""

    available_bytes: int
    total_bytes: int


def machine_memory() -> MachineMemory:
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    sizes = {name.rstrip(":"): 1024 * int(value) for name, value, *_ in lines}
    return MachineMemory(sizes["MemAvailable"], sizes["MemTotal"])

"""Checks whether the data folder is on a local disk."""

from __future__ import annotations

from trainer.contract.mounts import network_file_system
from trainer.contract.paths import DataDir, free_disk


def store_warning(data: DataDir) -> str:
    """Return a warning if the data folder is on a network file system, where the stores are slower, or "" if not."""
    folder, _ = free_disk(data.root)
    name = network_file_system(folder)
    # Ignore file systems on which no files can be created.
    if name in (None, "proc", "sysfs"):
        return ""
    return (
        f"{data.root} is on {name}, where processes that read or write jobs block each other; choose a local --data-dir"
    )

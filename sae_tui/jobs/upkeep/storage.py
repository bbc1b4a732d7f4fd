"""What to know of the disk that holds the jobs."""

from __future__ import annotations

import os

from trainer.contract.paths import DataDir
from trainer.contract.store.database import network_file_system


def store_warning(data: DataDir) -> str:
    """Return why the stores are slower here than on a local disk; "" if they are not."""
    folder = next(folder for folder in (data.root, *data.root.parents) if os.path.exists(folder))
    name = network_file_system(folder)
    if name is None:
        return ""
    return f"{data.root} is on {name}, where reading and writing jobs wait for each other; better a local --data-dir"

"""Opens a data folder's control store for writing, and closes it afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control


@contextlib.contextmanager
def open_control(data: DataDir) -> Iterator[Control]:
    """Open a data folder's control store for writing; create it if it is missing."""
    control = Control(data.control_db)
    try:
        yield control
    finally:
        control.close()


@contextlib.contextmanager
def existing(data: DataDir, job_id: int) -> Iterator[Control]:
    """Open the control store to access a job; if the store is missing, raise `UserError` instead of creating it."""
    if not data.control_db.exists():
        raise UserError(f"there is no job {job_id}; `sae-tui jobs` lists them")
    # Changing a job also writes to its folders, so refuse symbolic links in place of these folders.
    data.refuse_links(job_id)
    with open_control(data) as control:
        yield control

"""Opens the control store of a data folder, and closes it after a change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control


@contextlib.contextmanager
def open_control(data: DataDir) -> Iterator[Control]:
    """Open the control store of a data folder for writing; create it if it is missing."""
    control = Control(data.control_db)
    try:
        yield control
    finally:
        control.close()


@contextlib.contextmanager
def existing(data: DataDir, job_id: int) -> Iterator[Control]:
    """Open the control store that contains a job; raise `UserError` if it is missing, and do not create a new one."""
    if not data.control_db.exists():
        raise UserError(f"there is no job {job_id}; `sae-tui jobs` lists them")
    # Check the job's folders for links, since changes to a job also write to its folders.
    data.refuse_links(job_id)
    with open_control(data) as control:
        yield control

"""The launch form as it was left: kept on disk while it is filled in, so that no end of the app loses it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sae_tui.jobs.launch.job_form import Draft, as_text, kind_of, read_job_table
from trainer.contract.errors import UserError
from trainer.contract.files import write_own
from trainer.contract.paths import DataDir


def keep(data: DataDir, draft: Draft) -> None:
    """Write what is right in a draft; where that fails, the form on the screen is all there is."""
    with contextlib.suppress(OSError, UserError):
        if not data.root.exists():
            data.create()
        write_own(file_of(data, kind_of(draft.values)), as_text(draft, {}), durable=False)


def drop(data: DataDir, kind: str) -> None:
    """Forget the draft of a kind of job, which was launched or taken back."""
    with contextlib.suppress(OSError):
        file_of(data, kind).unlink(missing_ok=True)


def kept(data: DataDir, kind: str) -> Path | None:
    """Return the draft of a kind of job that was left; None where there is none, or none that can be read any more."""
    file = file_of(data, kind)
    if not file.is_file():
        return None
    try:
        read_job_table(file)
    except UserError:
        return None
    return file


def file_of(data: DataDir, kind: str) -> Path:
    """Return where the draft of a kind of job is kept, for each of those who share the folder."""
    return data.root / f"draft-{kind}-{os.getuid()}.toml"

"""The launch form as it was left: kept on disk while it is filled in, so that no end of the app loses it."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from sae_tui.jobs.launch.job_form import Draft, as_text, kind_of, read_job_table
from trainer.contract.errors import UserError
from trainer.contract.files import write_own
from trainer.contract.paths import DataDir


class KeptDraft:
    """What one form leaves on disk: what a person has changed in it, until that is launched, replaced or taken back."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        # Of which kind of job what is on disk is; None where this form has nothing there.
        self._kind: str | None = None
        # Whether the form was filled from what another one has left.
        self.is_left = False

    def note_filled(self, path: Path, kind: str) -> None:
        """Note that the form was filled from a job file, which may be a draft that was left."""
        self.is_left = path == file_of(self._data, kind)
        if self.is_left:
            self._kind = kind

    def follow(self, draft: Draft, *, is_changed: bool) -> None:
        """Write what is right in the form as it is now, or forget what it had on disk."""
        kind = kind_of(draft.values)
        if self._kind and (self._kind != kind or not (is_changed or self.is_left)):
            drop(self._data, self._kind)
            self._kind = None
        if is_changed:
            keep(self._data, draft)
            self._kind = kind


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
    with contextlib.suppress(OSError, UserError):
        status = file.lstat()
        # In a folder that a group shares others may have put something there.
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            read_job_table(file)
            return file
    return None


def file_of(data: DataDir, kind: str) -> Path:
    """Return where the draft of a kind of job is kept, for each of those who share the folder."""
    return data.root / f"draft-{kind}-{os.getuid()}.toml"

"""Saves the launch form to disk while the user is filling it in, so the input survives an app exit or crash."""

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
    """The draft file for one form; it contains the user's changes until they are launched, replaced or undone."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        # The kind of job in the draft file, or None if this form has no draft file.
        self._kind: str | None = None
        # True if the form was filled from a draft file left by an earlier form.
        self.is_left = False

    def note_filled(self, path: Path, kind: str) -> None:
        """Record that the form was filled from a job file, which may be an earlier form's draft file."""
        self.is_left = path == file_of(self._data, kind)
        if self.is_left:
            self._kind = kind

    def follow(self, draft: Draft, *, is_changed: bool) -> None:
        """Save the form's valid values if the user has changed them; delete an unneeded draft file."""
        kind = kind_of(draft.values)
        if self._kind and (self._kind != kind or not (is_changed or self.is_left)):
            drop(self._data, self._kind)
            self._kind = None
        if is_changed:
            keep(self._data, draft)
            self._kind = kind


def keep(data: DataDir, draft: Draft) -> None:
    """Save a draft's valid values to its draft file; ignore errors because the form still contains the values."""
    with contextlib.suppress(OSError, UserError):
        if not data.root.exists():
            data.create()
        write_own(file_of(data, kind_of(draft.values)), as_text(draft, {}), durable=False)


def drop(data: DataDir, kind: str) -> None:
    """Delete the draft file for a kind of job, after a launch or an undo."""
    with contextlib.suppress(OSError):
        file_of(data, kind).unlink(missing_ok=True)


def kept(data: DataDir, kind: str) -> Path | None:
    """Return the draft file for a kind of job, or None if it is missing or cannot be read."""
    file = file_of(data, kind)
    with contextlib.suppress(OSError, UserError):
        status = file.lstat()
        # Ignore another user's file, which may exist in a folder shared by a group.
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            read_job_table(file)
            return file
    return None


def file_of(data: DataDir, kind: str) -> Path:
    """Return the path of the draft file for a kind of job; users who share a data folder have separate files."""
    return data.root / f"draft-{kind}-{os.getuid()}.toml"

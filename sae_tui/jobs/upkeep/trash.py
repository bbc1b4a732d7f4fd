"""Deletes jobs with their files by moving them to the trash, and restores them until the trash is emptied.

A job's row is written to the trash before any file is moved so that a deletion can be undone if a crash interrupts it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.machine import elsewhere
from sae_tui.jobs.states import stands
from sae_tui.jobs.store_access import existing, open_control
from trainer.contract.errors import UserError, sentence
from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json
from trainer.contract.paths import DataDir, numbered, private_folder, refuse_link
from trainer.contract.process import ProcessRef
from trainer.contract.runs.lock import hold, is_held, still_going
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Event, Job, Rank

# The file `whole` exists if all of the job's files are in the trash.
_ROW, _RUN, _SAE, _WHOLE = "row.json", "run", "sae", "whole"


class Thrown(msgspec.Struct, frozen=True):
    """A job in the trash, and the process that can restore it."""

    job: Job
    owner: ProcessRef
    events: tuple[Event, ...] = ()
    ranks: tuple[Rank, ...] = ()


class FilesLeft(UserError):
    """Raised when files from an interrupted deletion cannot be moved out of the trash."""


def refuse_unless_ended(data: DataDir, job_id: int) -> None:
    """Raise `UserError` if a job cannot be deleted because it has not ended."""
    with existing(data, job_id) as control:
        _require_ended(data, control, job_id)


def throw_away(data: DataDir, job_id: int) -> str:
    """Move an ended job to the trash, with its run and its SAE; `put_back` undoes this."""
    data.refuse_links(job_id)
    with existing(data, job_id) as control:
        _hold(_owner_file(data, os.getpid()))
        thrown = _thrown_job(control, _require_ended(data, control, job_id))
        folder = private_folder(data.trash / str(job_id))
        try:
            write_whole(folder / _ROW, msgspec.json.encode(thrown))
            # Remove the row before any file is moved so that the job cannot be resumed at the same time.
            if not control.forget(job_id):
                raise UserError(_not_ended(data, control.job(job_id)))
            _move(data.run(job_id).root, folder / _RUN)
            _move(data.sae(job_id), folder / _SAE)
            write_whole(folder / _WHOLE, b"")
        except (UserError, OSError) as error:
            reason = f"the files of job {job_id} cannot be moved: " if isinstance(error, OSError) else ""
            left = _put_back(data, control, thrown)
            raise UserError("; ".join([reason + sentence(error), *left])) from None
    return f"job {job_id} ({thrown.job.name}) is deleted"


def throw_all_away(data: DataDir, job_ids: Sequence[int]) -> list[str]:
    """Delete all of these jobs, or none if one of them cannot be deleted; return a message for each job."""
    messages: list[str] = []
    try:
        for job_id in job_ids:
            messages.append(throw_away(data, job_id))
    except UserError as error:
        try:
            put_all_back(data, job_ids[: len(messages)])
        except UserError as left:
            raise UserError(f"{error}; {left}") from None
        raise
    return messages


def put_back(data: DataDir, job_id: int) -> str:
    """Undo a deletion; raise `UserError` if the job is no longer in the trash or its files cannot be moved back."""
    data.refuse_links(job_id)
    thrown = _read(data, job_id)
    if thrown is None:
        raise UserError(f"job {job_id} is no longer in the trash")
    with open_control(data) as control:
        if left := _put_back(data, control, thrown):
            raise UserError("; ".join(left))
    return f"job {job_id} ({thrown.job.name}) is restored"


def put_all_back(data: DataDir, job_ids: Sequence[int]) -> list[str]:
    """Undo the deletion of as many of these jobs as possible; raise `UserError` if any deletion cannot be undone."""
    messages: list[str] = []
    problems: list[str] = []
    for job_id in job_ids:
        try:
            messages.append(put_back(data, job_id))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    return messages


def empty(data: DataDir, job_ids: Iterable[int] | None = None) -> int:
    """Permanently delete the files of these jobs; return the number of bytes freed.

    If `job_ids` is None, delete the files of all jobs that can no longer be restored. Undo interrupted deletions. If
    this fails for some files, delete all other jobs, then raise `FilesLeft`. Raise `UserError` if the trash is a
    symbolic link, whose target may contain files that were never deleted.
    """
    refuse_link(data.trash)
    freed = 0
    left: list[str] = []
    for folder in _trash_folders(data) if job_ids is None else [data.trash / str(job_id) for job_id in job_ids]:
        job_id = int(folder.name)
        thrown = _read(data, job_id)
        if job_ids is None and thrown and _may_be_put_back(data, thrown.owner):
            continue
        if thrown and not (folder / _WHOLE).exists():
            # The deletion was interrupted, so undo it.
            with open_control(data) as control:
                left += _put_back(data, control, thrown)
        elif (folder / _ROW).exists() and not (folder / _WHOLE).exists():
            # The row cannot be read. Move back only the files so that `repair` can rebuild the row from them.
            left += _put_files_back(data, job_id)
        else:
            freed += size(folder)
            _remove(data, folder)
    _clear_owner_files(data)
    if left:
        raise FilesLeft("; ".join(left))
    return freed


def _may_be_put_back(data: DataDir, owner: ProcessRef) -> bool:
    """Return whether the process that deleted a job may be alive, even in another PID namespace or on another host."""
    return owner.is_alive() or bool(is_held(_owner_file(data, owner.pid)))


def _owner_file(data: DataDir, pid: int) -> Path:
    """Return the lock file for a process that has deleted jobs; processes with the same pid on other hosts share it."""
    return data.locks / f"trash-{pid}.lock"


def _clear_owner_files(data: DataDir) -> None:
    for file in data.locks.glob("trash-*.lock"):
        if is_held(file) is False:
            with contextlib.suppress(OSError):
                file.unlink()


@functools.cache
def _hold(file: Path) -> None:
    hold(file)
    if not file.exists():
        # The first file was removed before it could be locked, so lock a new one.
        hold(file)


def _thrown_job(control: Control, job: Job) -> Thrown:
    return Thrown(job, ProcessRef.current(), tuple(control.events(job.id)), tuple(control.ranks(job.id)))


def size(folder: Path) -> int:
    """Return the total size of all files under a folder, in bytes."""
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += 0 if file.is_symlink() or file.is_dir() else file.stat().st_size
    return total


def _require_ended(data: DataDir, control: Control, job_id: int) -> Job:
    job = control.job(job_id)
    if not job.state.is_final:
        raise UserError(_not_ended(data, job))
    if is_held(data.run(job_id).lock_file):
        raise UserError(still_going(data.run(job_id).root))
    return job


def _not_ended(data: DataDir, job: Job) -> str:
    why = elsewhere(data, job)
    return f"job {job.id} {stands(job)}; " + (why or "stop it before you delete it")


def _remove(data: DataDir, folder: Path) -> None:
    """Permanently delete a job's folder in the trash; for the newest job, keep an empty folder to reserve its id."""
    is_newest = int(folder.name) >= data.last_id()
    # A symbolic link could replace the trash at any time, so access the folder through a descriptor for the trash.
    with contextlib.suppress(FileNotFoundError):
        trash = os.open(data.trash, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            shutil.rmtree(folder.name, ignore_errors=True, dir_fd=trash)
        finally:
            os.close(trash)
    if is_newest:
        private_folder(folder)


def _trash_folders(data: DataDir) -> list[Path]:
    folders = numbered(data.trash) if data.trash.is_dir() else []
    return [folder for folder in folders if not folder.is_symlink()]


def _read(data: DataDir, job_id: int) -> Thrown | None:
    thrown = read_json(data.trash / str(job_id) / _ROW, Thrown)
    return thrown if thrown and thrown.job.id == job_id else None


def _put_back(data: DataDir, control: Control, thrown: Thrown) -> list[str]:
    """Restore a job's files and row from the trash; return messages about the files that cannot be moved."""
    job_id = thrown.job.id
    folder = data.trash / str(job_id)
    with contextlib.suppress(OSError):
        # Remove this file first. The deletion then looks interrupted, so `empty` does not delete the job's files.
        (folder / _WHOLE).unlink(missing_ok=True)
    left = _move_all_back(data, job_id)
    control.restore(thrown.job, events=thrown.events, ranks=thrown.ranks)
    if not left:
        shutil.rmtree(folder, ignore_errors=True)
    return left


def _put_files_back(data: DataDir, job_id: int) -> list[str]:
    left = _move_all_back(data, job_id)
    if not left:
        shutil.rmtree(data.trash / str(job_id), ignore_errors=True)
    return left


def _move_all_back(data: DataDir, job_id: int) -> list[str]:
    """Move a job's files back from the trash; return messages about the files that cannot be moved."""
    folder = data.trash / str(job_id)
    places = {folder / _RUN: data.run(job_id).root, folder / _SAE: data.sae(job_id)}
    return [problem for source, target in places.items() if (problem := _move_back(source, target))]


def _move_back(source: Path, target: Path) -> str:
    """Move a folder back from the trash; return why this failed, or "" on success."""
    reason = "the target exists"
    try:
        _move(source, target)
    except OSError as error:
        reason = sentence(error)
    return f"{source} cannot be moved back to {target}: {reason}" if source.exists() else ""


def _move(source: Path, target: Path) -> None:
    """Move a folder if it exists and the target does not; on the same disk, this is a single rename."""
    if source.exists() and not target.exists():
        shutil.move(source, target)

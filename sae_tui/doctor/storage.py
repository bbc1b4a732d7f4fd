"""Checks the data folder's disk, and SQLite, which stores the job records."""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sae_tui.doctor.base import CheckedMachine, Finding
from sae_tui.jobs.gpus.locks import lock_folder, lock_problem
from trainer.contract.mounts import network_file_system
from trainer.contract.store.database import OTHER_FOLDER, no_locks
from trainer.contract.store.holder import describe_holder, holder_of, is_halted
from trainer.contract.wording import gibibytes

LEAST_FREE_BYTES = 1 << 30
COMFORTABLE_BYTES = 10 << 30


def check_folder(box: CheckedMachine) -> Iterator[Finding]:
    """Check that a file can be created in the data folder; the test file is unnamed, so nothing is left behind."""
    root, folder = box.data.root, _existing(box)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"?")
            file.flush()
    except OSError as error:
        reason = error.strerror or str(error)
        yield Finding("error", "data folder", f"nothing can be written to {folder}: {reason}", OTHER_FOLDER)
        return
    yield Finding("ok", "data folder", f"{root}" if folder == root else f"{root}, which the first job creates")


def check_space(box: CheckedMachine) -> Iterator[Finding]:
    """Check the free space, because each checkpoint of a large SAE takes several gibibytes."""
    folder = _existing(box)
    disk = shutil.disk_usage(folder)
    sentence = f"{gibibytes(disk.free)} free of {gibibytes(disk.total)} in {folder}"
    remedy = f"free some space, or {OTHER_FOLDER}"
    if disk.free < LEAST_FREE_BYTES:
        yield Finding("error", "disk", f"{sentence}, too little for a checkpoint", remedy)
    elif disk.free < COMFORTABLE_BYTES:
        yield Finding("warning", "disk", f"{sentence}; a few checkpoints of a large SAE fill it", remedy)
    else:
        yield Finding("ok", "disk", sentence)


def check_file_system(box: CheckedMachine) -> Iterator[Finding]:
    """Check that the data folder is on a local disk.

    SQLite's write-ahead log needs shared memory between processes, which network file systems do not provide.
    """
    name = network_file_system(_existing(box))
    if name is None:
        yield Finding("ok", "file system", f"{box.data.root} is on a local disk")
        return
    sentence = (
        f"{box.data.root} is on {name}, where SQLite's WAL does not work: readers and writers wait for each other"
    )
    yield Finding("warning", "file system", sentence, "choose a folder on a local disk with --data-dir")


def check_file_locks(box: CheckedMachine) -> Iterator[Finding]:
    """Check that file locks work in the data folder, because they protect stores, runs and GPUs."""
    if problem := no_locks(_existing(box)):
        sentence, _, remedy = problem.partition("; ")
        yield Finding("error", "file locks", sentence, remedy)
    else:
        yield Finding("ok", "file locks", "files in the data folder can be locked")


def check_store_lock(box: CheckedMachine) -> Iterator[Finding]:
    """Report a stopped process that holds the job store's lock and thereby blocks all other processes."""
    pid = holder_of(box.data.control_db)
    if pid and is_halted(pid):
        sentence, _, remedy = describe_holder(pid).partition("; ")
        yield Finding("error", "store lock", f"no job can be changed: the store is locked by {sentence}", remedy)


def check_locks(box: CheckedMachine) -> Iterator[Finding]:
    """Check that GPU locks are shared by all users' jobs."""
    if not box.gpus.cuda:
        return
    if problem := lock_problem(box.data, box.gpus.source_name):
        reason, _, remedy = problem.rpartition(": ")
        yield Finding("warning", "GPU locks", reason, remedy)
    else:
        yield Finding(
            "ok", "GPU locks", f"in {lock_folder(box.data, box.gpus.source_name)}, for all users of this machine"
        )


def check_sqlite(_: CheckedMachine) -> Iterator[Finding]:
    """Check SQLite's version: before 3.51.3, except on two patched branches, concurrent writers can corrupt a WAL."""
    version = sqlite3.sqlite_version_info
    if not has_wal_reset_bug(version):
        yield Finding("ok", "SQLite", f"version {sqlite3.sqlite_version}")
        return
    sentence = (
        f"version {sqlite3.sqlite_version} can, in rare cases, damage a store that several processes write to at once "
        "(WAL-reset bug); this affects the list of jobs, since the metrics of a run have only one writer"
    )
    remedy = "use a Python with SQLite 3.51.3 or newer, 3.50.7 or 3.44.6"
    yield Finding("warning", "SQLite", sentence, remedy)


def has_wal_reset_bug(version: tuple[int, ...]) -> bool:
    """Return whether a version has the bug fixed in 3.51.3, 3.50.7 and 3.44.6 (sqlite.org/wal.html#walresetbug)."""
    if version < (3, 7) or version >= (3, 51, 3):
        return False
    return not ((3, 50, 7) <= version < (3, 51) or (3, 44, 6) <= version < (3, 45))


def _existing(box: CheckedMachine) -> Path:
    """Return the data folder or, if it does not exist yet, its nearest existing parent."""
    root = box.data.root
    return next(folder for folder in (root, *root.parents) if os.path.exists(folder))

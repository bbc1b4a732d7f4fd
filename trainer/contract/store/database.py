"""Opens the SQLite stores for writing or for read-only access, and converts errors to one-sentence messages."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from trainer.contract.errors import UserError
from trainer.contract.mounts import network_file_system
from trainer.contract.paths import file_mode, is_shared, refuse_links_on_the_way
from trainer.contract.prctl import rename_if_new
from trainer.contract.store import migrations
from trainer.contract.store.migrations import MIGRATIONS, Schema, statements_of_new

BUSY_TIMEOUT_S = 5.0
# A transaction that changes many jobs ends after this time, because it keeps other processes from writing.
LONGEST_TRANSACTION_S = 0.5
LARGEST_IDLE_LOG = 8 << 20
OTHER_FOLDER = "choose another folder with --data-dir or $SAE_TUI_DATA_DIR"
# The suffixes of the files that SQLite creates next to a store.
BESIDE = ("-wal", "-shm", "-journal")
# The error codes for a rollback journal left by a killed writer, and for a write-ahead log that must be recovered.
_TO_RECOVER = (sqlite3.SQLITE_READONLY_ROLLBACK, sqlite3.SQLITE_READONLY_RECOVERY)


class StoreError(UserError):
    """An error for a store that cannot be used: it is locked, read-only, corrupt, missing or from a newer version."""


class StoreCorrupt(StoreError):
    """An error for a corrupt store, with content that SQLite cannot have written."""


class StoreMissing(StoreError):
    """An error for a store that does not exist yet, or that is an empty file without tables."""


def open_writer(path: Path, schema: Schema) -> sqlite3.Connection:
    """Open a read-write connection in autocommit mode.

    If necessary, the file is created (with mode 0600, or 0660 if a group shares the folder) or migrated.
    """
    with explain_errors(path):
        _refuse_links(path)
        if not os.path.lexists(path):
            _make(path, schema)
        _refuse_odd(path)
        return _open_for_writing(path, schema)


def _make(path: Path, schema: Schema) -> None:
    """Create a store with its tables under a temporary name, and then rename it.

    If the store were created in place, a full disk could leave behind an empty store, which would be mistaken for a
    corrupt one.
    """
    part = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        _make_file(part, path.parent)
        with contextlib.closing(_open_for_writing(part, schema)) as connection:
            # Move the WAL content into the store because the WAL is not renamed. Closing the connection would do this
            # too, but would ignore a full disk.
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if not rename_if_new(part, path):
            # The file system cannot rename without replacing, so create an empty file now and the tables later.
            with contextlib.suppress(FileExistsError):
                _make_file(path, path.parent)
    finally:
        for suffix in ("", *BESIDE):
            part.with_name(part.name + suffix).unlink(missing_ok=True)


def _make_file(path: Path, folder: Path) -> None:
    # The WAL files get the mode of the main file. Create the main file without opening it: closing any of its
    # descriptors would drop the POSIX locks held by other connections in this process. The next process to close the
    # store would then delete the WAL in use by these connections.
    os.mknod(path, 0o600)
    if is_shared(folder):
        path.chmod(file_mode(folder))


def _open_for_writing(path: Path, schema: Schema) -> sqlite3.Connection:
    with _connect(f"file:{_quote(path)}?mode=rw") as connection:
        if schema == "gpu":  # the only store that regularly deletes rows
            _let_shrink(connection)
        _keep_journal(connection, "delete" if network_file_system(path) else "wal")
        connection.execute("PRAGMA synchronous=NORMAL")
        _bring_up_to_date(connection, path, schema)
        return connection


def open_reader(path: Path, schema: Schema) -> sqlite3.Connection:
    """Open a read-only connection; raise `StoreMissing` if there is no store, or `StoreError` if it cannot be used."""
    with explain_errors(path):
        if not os.path.lexists(path):
            raise StoreMissing(f"there is no store at {path}")
        _refuse_odd(path)
        try:
            return _open_readonly(path, schema)
        except sqlite3.OperationalError as error:
            if _code(error) not in _TO_RECOVER:
                raise
        # A read-only connection cannot complete or roll back a killed writer's transaction, so open the store for
        # writing first.
        with _connect(f"file:{_quote(path)}?mode=rw") as connection:
            _version(connection)
            connection.close()
        return _open_readonly(path, schema)


def _open_readonly(path: Path, schema: Schema) -> sqlite3.Connection:
    with _connect(f"file:{_quote(path)}?mode=ro") as connection:
        connection.execute("PRAGMA query_only=ON")
        # Version 0 means that the writer has created the file but not yet its tables.
        if _refuse_newer(connection, path, schema) == 0:
            raise StoreMissing(f"there is no store at {path} yet")
        return connection


def _refuse_links(path: Path) -> None:
    try:
        refuse_links_on_the_way(path)
    except OSError as error:
        raise StoreError(f"the store {path} cannot be opened: {error.strerror}") from None


def _refuse_odd(path: Path) -> None:
    """Raise `StoreError` if a file that SQLite would write is a link, a pipe or a folder."""
    _refuse_links(path)
    for suffix in ("", *BESIDE):
        file = path.with_name(path.name + suffix)
        try:
            status = file.lstat()
        except FileNotFoundError:
            continue
        if stat.S_ISLNK(status.st_mode):
            raise StoreError(f"the store {file} is a symbolic link, and symbolic links are not followed; remove it")
        # In a folder that other users can write to, refuse files with other hard links too.
        if not stat.S_ISREG(status.st_mode) or (status.st_nlink > 1 and is_shared(file.parent)):
            raise StoreError(f"the store {file} is not a plain file or has other hard links; remove it")


def as_text(content: bytes) -> str:
    """Decode a text column, replacing invalid bytes; by default, a single invalid value would make the query fail."""
    return content.decode(errors="replace")


def data_version(connection: sqlite3.Connection) -> int:
    """Return a number that changes when another connection commits; reading it takes about 6 µs."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Make the body of the context one atomic write.

    The transaction is IMMEDIATE because a read cannot be upgraded to a write after another process has committed.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # if the disk is full, SQLite has already rolled back
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def savepoint(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Make the body of the context one atomic part of the current transaction."""
    connection.execute("SAVEPOINT part")
    try:
        yield connection
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK TO part")
            connection.execute("RELEASE part")
        raise
    connection.execute("RELEASE part")


@contextlib.contextmanager
def explain_errors(path: Path) -> Iterator[None]:
    """Convert SQLite and file system errors to `StoreError`s with a sentence saying what to do."""
    try:
        yield
    except sqlite3.Error as error:
        kind = StoreCorrupt if _says_corrupt(str(error)) else StoreError
        raise kind(_explain(path, str(error), _code(error))) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise StoreError(
            f"the store {path} cannot be opened: {reason}; choose another folder with --data-dir"
        ) from error


def _code(error: sqlite3.Error) -> int:
    """Return SQLite's extended error code, or 0 for errors raised by Python's `sqlite3` module itself."""
    return getattr(error, "sqlite_errorcode", 0)


def _explain(path: Path, text: str, code: int = 0) -> str:
    if code in _TO_RECOVER:
        return (
            f"a killed process left the store {path} half written, and it is read-only here; "
            "any command run by its owner repairs it"
        )
    if "locked" in text or "busy" in text:
        if problem := no_locks(path.parent):
            return f"the store {path} cannot be locked: {problem}"
        # Import late because the queue process does not need this module.
        from trainer.contract.store.holder import describe_holder, holder_of

        pid = holder_of(path)
        what = f"the store {path} has been locked by another process for more than {BUSY_TIMEOUT_S:g} s"
        return f"{what}: {describe_holder(pid)}" if pid else f"{what}; try again"
    if "readonly" in text:
        return (
            f"the store {path} is read-only; make it and its folder writable or choose another folder with --data-dir"
        )
    if "unable to open" in text:
        return f"the store {path} cannot be opened; make it readable or choose another folder with --data-dir"
    if _says_corrupt(text):
        return f"the store {path} is corrupt; `sae-tui repair` moves it aside and rebuilds it from the runs next to it"
    if "full" in text or "disk I/O" in text:  # SQLite reports an exceeded quota as an I/O error
        return f"the disk with {path} is full or failing ({text}); free some space"
    return f"the store {path} cannot be used: {text}"


def _says_corrupt(text: str) -> bool:
    return "malformed" in text or "not a database" in text


def file_identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of the file at a path, or None if there is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def check_whole(path: Path, schema: Schema) -> None:
    """Raise `StoreCorrupt` if a store is corrupt.

    The check reads the complete file, which takes 0.3 s for 3 million rows.
    """
    try:
        with contextlib.closing(open_reader(path, schema)) as connection, explain_errors(path):
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except StoreMissing as error:
        raise StoreCorrupt(_explain(path, "not a database")) from error
    if verdict != "ok":
        raise StoreCorrupt(_explain(path, "malformed"))


def copy_store(path: Path, target: Path, schema: Schema) -> None:
    """Copy a store, which may be in use, to a single new file; raise `StoreError` if it cannot be read."""
    with contextlib.closing(open_reader(path, schema)) as source, explain_errors(path):
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
        with contextlib.closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode=DELETE")


def set_aside(path: Path, word: str) -> Path | None:
    """Rename a store and its WAL files to `<name>.<word>-<number>`, with the lowest free number from 1.

    Return the new path, or None if the store itself is gone. A leftover write-ahead log is also moved or deleted
    because it would be replayed into the next store.
    """
    beside = [path.with_name(f"{path.name}{suffix}") for suffix in ("-wal", "-shm")]
    with explain_errors(path):
        if not path.exists():
            for file in beside:
                file.unlink(missing_ok=True)
            return None
        names = (path.with_name(f"{path.name}.{word}-{number}") for number in itertools.count(1))
        target = next(name for name in names if not name.exists())
        for file in (path, *beside):
            with contextlib.suppress(FileNotFoundError):
                file.rename(str(target) + file.name.removeprefix(path.name))
        return target


def no_locks(folder: Path) -> str:
    """Try to lock an unnamed file in a folder; return why files there cannot be locked, or "" if they can.

    On a file system without locks (such as NFS without a working lock service), SQLite only reports that the store is
    busy.
    """
    # Import late because `tempfile` would use 1 MiB in the queue process.
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kind of lock that SQLite uses
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kind of lock used for runs and GPUs
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
            return (
                f"the file system of {folder} has no locks ({error.strerror}); mount it with locks, or {OTHER_FOLDER}"
            )
    return ""


@contextlib.contextmanager
def _connect(uri: str) -> Iterator[sqlite3.Connection]:
    """Yield a new connection to set up; it is closed only if the body of the context fails."""
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    connection.row_factory = sqlite3.Row
    try:
        yield connection
    except BaseException:
        connection.close()
        raise


def _keep_journal(connection: sqlite3.Connection, mode: Literal["delete", "wal"]) -> None:
    """Set the file's journal mode, retrying for `BUSY_TIMEOUT_S`.

    To change the mode, SQLite upgrades a read lock. If another process does the same, SQLite fails immediately despite
    its busy timeout because the two upgrades would otherwise deadlock.
    """
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode={mode}")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _let_shrink(connection: sqlite3.Connection) -> None:
    """Make a new file return free pages to the disk, and truncate its write-ahead log after each checkpoint.

    The vacuum mode is fixed when the first page of a file is written, so this function must be called before any write.
    """
    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    connection.execute(f"PRAGMA journal_size_limit={LARGEST_IDLE_LOG}")


def _bring_up_to_date(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    if _refuse_newer(connection, path, schema) == 0:
        _make_tables(connection, schema)
    if _version(connection) == len(MIGRATIONS[schema]):
        return
    # Migrate in a separate process: sqlite-utils uses 17 MiB, too much for the app and queue processes, and takes 1.5 s
    # to import if pandas is installed. Run the file with -P because a user's `trainer.py` in the working directory
    # would otherwise shadow the package.
    command = [sys.executable, "-P", migrations.__file__, schema, str(path.absolute())]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        _, _, reason = (done.stderr.strip().splitlines() or [""])[-1].partition(": ")
        raise StoreError(_explain(path, reason or f"migrating it failed with exit code {done.returncode}"))


def _make_tables(connection: sqlite3.Connection, schema: Schema) -> None:
    with transaction(connection):
        # Another process may have created the tables first.
        if _version(connection) == 0:
            for statement in statements_of_new(schema):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version={len(MIGRATIONS[schema])}")


def _version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _refuse_newer(connection: sqlite3.Connection, path: Path, schema: Schema) -> int:
    """Return a store's schema version; raise `StoreError` if a newer version of the program created it."""
    version = _version(connection)
    newest = len(MIGRATIONS[schema])
    if version > newest:
        raise StoreError(
            f"the store {path} was made by a newer version (schema {version}, this one supports {newest}); "
            "update sae-tui or choose another folder with --data-dir"
        )
    return version


def _quote(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")

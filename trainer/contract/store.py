"""Opening the SQLite files: one writer each, readers read-only, every failure one clear sentence."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from trainer.contract.migrations import MIGRATIONS, Schema, migrate
from trainer.contract.problems import UserError

BUSY_TIMEOUT_S = 5.0
# f_type of statfs(2): WAL needs memory shared between the processes of one host, which these cannot give.
NETWORK_FILE_SYSTEMS = {0x6969: "NFS", 0xFF534D42: "CIFS", 0xFE534D42: "SMB2", 0x0BD00BD0: "Lustre", 0x65735546: "FUSE"}


class StoreError(UserError):
    """A store that cannot be used: locked, read-only, corrupt, missing or of a newer version."""


def open_writer(path: Path, schema: Schema) -> sqlite3.Connection:
    """A read-write connection in autocommit mode, the file created (0600) and migrated if due."""
    with explained(path):
        # Readers, and WAL's own files, take the mode of the main file.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = _connect(f"file:{_quoted(path)}?mode=rw")
        journal = "DELETE" if network_file_system(path) else "WAL"
        connection.execute(f"PRAGMA journal_mode={journal}")
        connection.execute("PRAGMA synchronous=NORMAL")
        _bring_up_to_date(connection, path, schema)
        return connection


def open_reader(path: Path, schema: Schema) -> sqlite3.Connection:
    """A read-only connection; raises `StoreError` where there is no store yet or it is of a newer version."""
    with explained(path):
        if not path.exists():
            raise StoreError(f"there is no store at {path}")
        connection = _connect(f"file:{_quoted(path)}?mode=ro")
        connection.execute("PRAGMA query_only=ON")
        _refuse_newer(connection, path, schema)
        return connection


def data_version(connection: sqlite3.Connection) -> int:
    """Changes when another connection has committed; costs about 6 µs."""
    return int(connection.execute("PRAGMA data_version").fetchone()[0])


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """One all-or-nothing write. IMMEDIATE, since a read that upgrades to a write fails at once when overtaken."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turns SQLite's and the file system's errors into sentences that say what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise StoreError(_explain(path, error)) from error
    except OSError as error:
        raise StoreError(f"the store {path} cannot be opened: {error.strerror or error}") from error


def _explain(path: Path, error: sqlite3.Error) -> str:
    text = str(error)
    if "locked" in text or "busy" in text:
        return f"the store {path} is locked by another process for more than {BUSY_TIMEOUT_S:g} s; try again"
    if "readonly" in text:
        return f"the store {path} is read-only; make it writable or choose another folder with --data-dir"
    if "malformed" in text or "not a database" in text:
        return f"the store {path} is corrupt; move it away (the runs beside it keep their own files) and start again"
    if "disk" in text and "full" in text:
        return f"the disk that holds {path} is full; free some space"
    return f"the store {path} cannot be used: {text}"


def network_file_system(path: Path) -> str | None:
    """The name of the network file system that holds the path, where WAL cannot work; else None."""
    with contextlib.suppress(OSError, ValueError):
        output = subprocess.run(["stat", "-f", "-c", "%t", str(path)], capture_output=True, text=True, timeout=5)
        return NETWORK_FILE_SYSTEMS.get(int(output.stdout.strip() or "0", 16))
    return None


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    connection.row_factory = sqlite3.Row
    connection.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
    return connection


def _bring_up_to_date(connection: sqlite3.Connection, path: Path, schema: Schema) -> None:
    version = _refuse_newer(connection, path, schema)
    if version == len(MIGRATIONS[schema]):
        return
    if "torch" in sys.modules:
        migrate(path, schema)
        return
    # sqlite-utils costs 17 MiB and 0.3 s, which the app and a waiting supervisor shall not carry.
    command = [sys.executable, "-m", "trainer.contract.migrations", schema, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise StoreError(f"the store {path} could not be brought up to date: {done.stderr.strip().splitlines()[-1:]}")


def _refuse_newer(connection: sqlite3.Connection, path: Path, schema: Schema) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    known = len(MIGRATIONS[schema])
    if version > known:
        raise StoreError(
            f"the store {path} was made by a newer version (schema {version}, this one knows {known}); "
            "update sae-tui or choose another folder with --data-dir"
        )
    return version


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%25").replace("?", "%3f").replace("#", "%23")

"""Keeps stores open for a long time, even if their files are deleted, replaced, locked or corrupted."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from trainer.contract.errors import UserError
from trainer.contract.store.database import StoreMissing, data_version, explain_errors, file_identity


class StoreFile:
    """A connection to the store at a path; it is opened on first use, and reopened when the file is replaced.

    SQLite itself would continue to use the deleted file, and everything written to that file would be lost.
    """

    def __init__(self, path: Path, open_store: Callable[[], sqlite3.Connection]) -> None:
        self.path = path
        self._open_store = open_store
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        # How many times the file was opened. The device and inode are not enough to identify a file, because a new file
        # may reuse a deleted file's inode.
        self.times_opened = 0

    def connection(self) -> sqlite3.Connection:
        """Return a connection to the file currently at the path; raise `StoreError` if it cannot be opened."""
        with explain_errors(self.path):
            if self._connection is None or file_identity(self.path) != self._identity:
                self.close()
                # Get the identity before opening the file, so that the next call notices if the file is replaced in
                # between.
                identity = file_identity(self.path)
                self._connection = self._open_store()
                self._identity = identity or file_identity(self.path)
                self.times_opened += 1
            return self._connection

    def version(self) -> tuple[int, int]:
        """Return a value that changes when another process writes to the store or replaces its file."""
        with explain_errors(self.path):
            data = data_version(self.connection())
            return self.times_opened, data

    def close(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None


class Versioned(Protocol):
    """A reader of a store; its `version` changes whenever the store's content may have changed."""

    def version(self) -> tuple[int, int]: ...

    def close(self) -> None: ...


Store = TypeVar("Store", bound=Versioned)


class StoreFollower(Generic[Store]):
    """Rereads a store whenever it has changed; the attribute `store` is the reader while the store is open."""

    def __init__(self, path: Path, open_store: Callable[[Path], Store]) -> None:
        self.store: Store | None = None
        self._path = path
        self._open_store = open_store
        self._version: tuple[int, int] | None = None
        self._was_there = False

    def poll(self, read: Callable[[Store | None], None]) -> bool:
        """Call `read` if the store has changed, with None if the file is gone; return whether `read` was called.

        Raise `UserError` if the store cannot be read or if `read` raises `UserError`; the next call then reopens the
        store. If nothing has changed, a call needs only one stat and takes 6 µs.
        """
        try:
            self.store = self.store or self._open_store(self._path)
            version = self.store.version()
            if version == self._version:
                return False
            read(self.store)
        except StoreMissing:
            self.close()
            return self._report_gone(read)
        except UserError:
            self.close()
            raise
        self._version, self._was_there = version, True
        return True

    def close(self) -> None:
        """Close the store; the next call to `poll` reopens and reads it."""
        if self.store:
            self.store.close()
        self.store = self._version = None

    def _report_gone(self, read: Callable[[Store | None], None]) -> bool:
        was_there, self._was_there = self._was_there, False
        if was_there:
            read(None)
        return was_there

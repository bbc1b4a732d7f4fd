"""Stores that stay in use for long while their files may vanish, be replaced, be locked or be damaged."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from trainer.contract.errors import UserError
from trainer.contract.store.database import StoreMissing, data_version, explain_errors, file_identity


class StoreFile:
    """The connection to the store at a path: opened when it is first used, and anew once another file is there.

    SQLite itself would go on with the file that was deleted, and what is written there is lost.
    """

    def __init__(self, path: Path, open_store: Callable[[], sqlite3.Connection]) -> None:
        self.path = path
        self._open_store = open_store
        self._connection: sqlite3.Connection | None = None
        self._identity: tuple[int, int] | None = None
        # Counted here, since a new file may get the inode of the one that was deleted.
        self._times_opened = 0

    def connection(self) -> sqlite3.Connection:
        """Return a connection to the file that is at the path now; raise `StoreError` where that cannot be opened."""
        with explain_errors(self.path):
            if self._connection is None or file_identity(self.path) != self._identity:
                self.close()
                # Taken first: should the file be replaced meanwhile, the next call sees that it is another one.
                identity = file_identity(self.path)
                self._connection = self._open_store()
                self._identity = identity or file_identity(self.path)
                self._times_opened += 1
            return self._connection

    def version(self) -> tuple[int, int]:
        """Return a value that changes when another process has written to the store or has replaced its file."""
        with explain_errors(self.path):
            data = data_version(self.connection())
            return self._times_opened, data

    def close(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None


class Versioned(Protocol):
    """What can be followed: a reader of a store whose `version` changes with what it reads."""

    def version(self) -> tuple[int, int]: ...

    def close(self) -> None: ...


Store = TypeVar("Store", bound=Versioned)


class Follower(Generic[Store]):
    """Reads a store again each time it has changed; `store` is its reader while it is open."""

    def __init__(self, path: Path, open_store: Callable[[Path], Store]) -> None:
        self.store: Store | None = None
        self._path = path
        self._open_store = open_store
        self._version: tuple[int, int] | None = None
        self._was_there = False

    def poll(self, read: Callable[[Store | None], None]) -> bool:
        """Call `read` if the store has changed, with None once its file has gone; tell whether it was called.

        Raise `UserError` where the store cannot be read now, or `read` does; the next call opens it anew.
        A call without news takes a stat and 6 µs.
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
        """Close the store; the next `poll` opens and reads it anew."""
        if self.store:
            self.store.close()
        self.store = self._version = None

    def _report_gone(self, read: Callable[[Store | None], None]) -> bool:
        was_there, self._was_there = self._was_there, False
        if was_there:
            read(None)
        return was_there

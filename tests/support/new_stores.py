"""Generates the SQL schema of a new store of each kind from all migrations; `make schemas` runs this module."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.contract.store.migrations import MIGRATIONS, NEW, Schema, migrate


def statements_of(path: Path) -> list[str]:
    """Return the statements that create the tables and indexes of a store."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
        return [sql for (sql,) in rows]


def text_of(schema: Schema) -> str:
    """Return the text of the SQL file for one kind of store."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        migrate(path, schema)
        return "".join(f"{statement};\n\n" for statement in statements_of(path))


if __name__ == "__main__":
    for kind in MIGRATIONS:
        (NEW / f"{kind}.sql").write_text(text_of(kind), encoding="utf-8")
    print(f"{len(MIGRATIONS)} kinds of store")

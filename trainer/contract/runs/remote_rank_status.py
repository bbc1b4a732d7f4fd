"""A file in the attempt folder in which a rank on another host records its host, pid and, later, exit status."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json
from trainer.contract.process import ProcessRef
from trainer.contract.store.rows import Number


class RankMark(msgspec.Struct, frozen=True):
    """A rank on another host; after it has exited, `exit_code` is set, or `exit_signal` if a signal killed it."""

    host: str
    process: ProcessRef
    exit_code: Number | None = None
    exit_signal: Number | None = None

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None or self.exit_signal is not None


def write_mark(file: Path, mark: RankMark) -> None:
    """Write a mark atomically."""
    write_whole(file, msgspec.json.encode(mark))


def read_mark(file: Path) -> RankMark | None:
    """Read a mark; return None if it is missing or unreadable."""
    return read_json(file, RankMark)

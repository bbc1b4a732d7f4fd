"""What a rank on another host leaves of itself in the attempt's folder: where it runs, then how it ended."""

from __future__ import annotations

from pathlib import Path

import msgspec

from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json
from trainer.contract.process import ProcessRef
from trainer.contract.store.rows import Number


class RankMark(msgspec.Struct, frozen=True):
    """`exit_signal` is set instead of `exit_code` where a signal killed it; neither while it runs."""

    host: str
    process: ProcessRef
    exit_code: Number | None = None
    exit_signal: Number | None = None

    @property
    def has_ended(self) -> bool:
        return self.exit_code is not None or self.exit_signal is not None


def write_mark(file: Path, mark: RankMark) -> None:
    """Whole or not at all."""
    write_whole(file, msgspec.json.encode(mark))


def read_mark(file: Path) -> RankMark | None:
    """None where there is none yet, or none that can be read."""
    return read_json(file, RankMark)

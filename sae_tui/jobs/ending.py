"""How a job ended, as recorded in `exit.json` in the run folder. A damaged store can be repaired from this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.json_file import read_json, write_json
from trainer.contract.store.rows import FewAtOnce, Number, Time
from trainer.contract.store.states import JobState


class RankEnding(msgspec.Struct, frozen=True):
    """How a rank ended; if a signal killed it, `exit_signal` is set instead of `exit_code`."""

    rank: FewAtOnce
    exit_code: Number | None
    exit_signal: Number | None
    error: str | None = None


class JobEnding(msgspec.Struct, frozen=True):
    """The final state of a job and its cause."""

    state: JobState
    ended: Time
    error: str | None = None
    output_path: str | None = None
    ranks: tuple[RankEnding, ...] = ()
    # The rank whose failure stopped the other ranks.
    first_failed: FewAtOnce | None = None

    def fields(self) -> dict[str, Any]:
        """Return the job row columns that describe how the job ended."""
        return {"ended": self.ended, "error": self.error, "output_path": self.output_path}


def write_ending(path: Path, ending: JobEnding) -> None:
    write_json(path, ending)


def read_ending(path: Path) -> JobEnding | None:
    """Return how the job ended, or None if there is no readable record."""
    return read_json(path, JobEnding)

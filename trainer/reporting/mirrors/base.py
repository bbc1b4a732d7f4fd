"""What a mirror is: a run in another tool, which shows this run's metrics."""

from __future__ import annotations

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trainer.contract.files import open_plain, write_own
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import members, to_table

# What the runs of this program are gathered under where a tool gathers runs.
PROJECT = "sae-tui"
_ID = re.compile("[0-9a-f]{8}")


class MirroredRun(msgspec.Struct, frozen=True):
    """What a mirror must know of a run: its folder and name, an id that stays when it is resumed, and where it begins.

    `settings` has the complete table of the job of every SAE, by its label, which is "" without a sweep.
    """

    folder: Path
    name: str
    id: str
    first_step: int
    settings: dict[str, dict[str, Any]]


class Mirror(ABC):
    """A run in another tool; used by one thread, and any call may raise."""

    @abstractmethod
    def __init__(self, run: MirroredRun) -> None:
        """Begin the run in the other tool, or go on with it where it is there."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the user finds it, in words."""

    @abstractmethod
    def log(self, label: str, step: int, values: Mapping[str, float]) -> None:
        """Hand over the values of an SAE at a step."""

    @abstractmethod
    def flush(self) -> None:
        """Have what was handed over be seen by readers."""

    @abstractmethod
    def close(self) -> None:
        """End the run in the other tool; it may be resumed."""


def mirrored_run(job: JobConfig, folder: Path, first_step: int) -> MirroredRun:
    """Return what mirrors must know of the run in a folder, where its id is kept."""
    settings = {label: to_table(member) for label, member in members(job).items()}
    return MirroredRun(folder, job.name, _id_of(folder / "mirror.id"), first_step, settings)


def _id_of(file: Path) -> str:
    """Read the id of a run, or choose one where there is none yet."""
    try:
        with open_plain(file) as stream:
            known = stream.read(100).decode(errors="replace").strip()
    except FileNotFoundError:
        known = ""
    if not _ID.fullmatch(known):
        known = secrets.token_hex(4)
        write_own(file, f"{known}\n")
    return known

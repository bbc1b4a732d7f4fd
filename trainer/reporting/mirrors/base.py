"""The interface for mirrors, which show a run's metrics in other tools."""

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

# The project name for tools that group runs by project.
PROJECT = "sae-tui"
_ID = re.compile("[0-9a-f]{8}")


class MirroredRun(msgspec.Struct, frozen=True):
    """The run to mirror.

    A resumed run keeps its `id`, and a new run has a `first_step` of 0. `settings` maps each SAE's label to its
    complete job table; if the run is not a sweep, the only label is "".
    """

    folder: Path
    name: str
    id: str
    first_step: int
    settings: dict[str, dict[str, Any]]


class Mirror(ABC):
    """A run in another tool. Only one thread uses a mirror, and any method may raise an exception."""

    @abstractmethod
    def __init__(self, run: MirroredRun) -> None:
        """Create the run in the other tool, or continue it if it exists."""

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the user can find the metrics, as text for messages."""

    @abstractmethod
    def log(self, label: str, step: int, values: Mapping[str, float]) -> None:
        """Send an SAE's values for a step."""

    @abstractmethod
    def flush(self) -> None:
        """Make all values sent so far visible to readers."""

    @abstractmethod
    def close(self) -> None:
        """End the run in the other tool; it can be continued later."""


def mirrored_run(job: JobConfig, folder: Path, first_step: int) -> MirroredRun:
    """Return the run to mirror; its id is stored in `folder`."""
    settings = {label: to_table(member) for label, member in members(job).items()}
    return MirroredRun(folder, job.name, _id_of(folder / "mirror.id"), first_step, settings)


def _id_of(file: Path) -> str:
    """Return the run id stored in a file; if there is no valid id, write a random one."""
    try:
        with open_plain(file) as stream:
            known = stream.read(100).decode(errors="replace").strip()
    except FileNotFoundError:
        known = ""
    if not _ID.fullmatch(known):
        known = secrets.token_hex(4)
        write_own(file, f"{known}\n")
    return known

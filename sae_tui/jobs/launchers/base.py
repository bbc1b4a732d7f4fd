"""What the supervisor needs of the ranks of an attempt, wherever they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from sae_tui.jobs.ending import RankEnding
from trainer.contract.paths import RunPaths
from trainer.contract.runs.rank_spec import RankSpec, rank_command
from trainer.contract.settings.job_file import AnyJob
from trainer.contract.store.rows import Rank

RankCommand = Callable[[Path], Sequence[str]]


class Beginning(msgspec.Struct, frozen=True):
    """An attempt about to begin. The ranks inherit `locks`, and so hold the GPUs for as long as they live."""

    job_id: int
    config: AnyJob
    paths: RunPaths
    spec: RankSpec
    locks: tuple[int, ...] = ()
    command: RankCommand = rank_command


class Attempt(Protocol):
    """All ranks of an attempt. Only `wait` takes time, and no more than it is told."""

    @property
    def alive(self) -> bool:
        """Whether anything of it may still run."""
        ...

    @property
    def is_waiting(self) -> bool:
        """Whether it stands in a queue that is not ours, so that no step can be expected of it."""
        ...

    @property
    def is_halted(self) -> bool:
        """Whether a rank cannot go on by itself, whatever it was doing."""
        ...

    @property
    def is_hung(self) -> bool:
        """Whether a rank could not be ended, and so counts as ended."""
        ...

    @property
    def has_failed(self) -> bool:
        """Whether a rank ended that should not have, so that the others cannot go on."""
        ...

    @property
    def codes(self) -> set[int | None]:
        """How the ranks ended so far: exit codes, negative for a signal."""
        ...

    def start(self) -> None:
        """Start every rank; raise OSError or `UserError`, upon which those started before are to be ended."""
        ...

    def wait(self, timeout_s: float) -> list[Rank]:
        """Wait up to `timeout_s` seconds; return the ranks that ended within this time."""
        ...

    def rows(self) -> list[Rank]:
        """Return all ranks as the store keeps them."""
        ...

    def ask_to_stop(self) -> None:
        """Tell ranks that cannot read the store that they are to save and end."""
        ...

    def ask_to_finish(self) -> None:
        """Ask ranks that cannot read the store to cool down and finish early."""
        ...

    def end(self) -> None:
        """Ask all that live to end; called again, end them for good once they have had their time."""
        ...

    def endings(self) -> tuple[RankEnding, ...]: ...

    def cause(self) -> str:
        """Return why the attempt failed: the error of the rank that failed first."""
        ...

    @property
    def first_failed(self) -> int | None:
        """The rank that failed before the others."""
        ...

    def describe(self) -> str:
        """Describe what is odd about its ranks now, such as one that is halted; return "" where all seem to work."""
        ...

    def dump_stacks(self, file: Path) -> None:
        """Write the stacks of every rank to a file, for whoever wants to know why it makes no step."""
        ...

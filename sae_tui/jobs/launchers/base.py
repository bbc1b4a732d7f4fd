"""The interface between the supervisor and the ranks of an attempt, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from sae_tui.jobs.ending import RankEnding
from trainer.contract.paths import RunPaths
from trainer.contract.runs.rank_spec import RankSpec, rank_command
from trainer.contract.settings.job import AnyJob
from trainer.contract.store.rows import Rank

RankCommand = Callable[[Path], Sequence[str]]


class AttemptSetup(msgspec.Struct, frozen=True):
    """Everything an attempt needs to start. The ranks inherit `locks`, and so hold the GPUs while they live."""

    job_id: int
    config: AnyJob
    paths: RunPaths
    spec: RankSpec
    locks: tuple[int, ...] = ()
    command: RankCommand = rank_command


class Attempt(Protocol):
    """All ranks of an attempt. `wait` blocks for at most its timeout; with SLURM, other calls may take up to 15 s."""

    @property
    def alive(self) -> bool:
        """True while any process of the attempt may still run."""
        ...

    @property
    def is_waiting(self) -> bool:
        """True while the attempt is pending in an external scheduler, so that no step can be expected."""
        ...

    @property
    def is_halted(self) -> bool:
        """True if a rank cannot continue on its own, in any phase."""
        ...

    @property
    def is_hung(self) -> bool:
        """True if a rank could not be killed; it is then treated as ended."""
        ...

    @property
    def has_failed(self) -> bool:
        """True if a rank ended prematurely, so that the other ranks cannot continue."""
        ...

    @property
    def codes(self) -> set[int | None]:
        """The exit codes of the ranks so far, negative for signals."""
        ...

    def start(self) -> None:
        """Start every rank; after an `OSError` or `UserError`, the caller must stop the ranks already started."""
        ...

    def wait(self, timeout_s: float) -> list[Rank]:
        """Wait up to `timeout_s` seconds; return the ranks that ended within this time."""
        ...

    def rows(self) -> list[Rank]:
        """Return all ranks as rows of the store."""
        ...

    def ask_to_stop(self) -> None:
        """Ask ranks that cannot read the store to save and stop."""
        ...

    def ask_to_finish(self) -> None:
        """Ask ranks that cannot read the store to cool down and finish early."""
        ...

    def end(self) -> None:
        """Ask all living ranks to stop; in later calls, kill them once their grace period has passed."""
        ...

    def endings(self) -> tuple[RankEnding, ...]: ...

    def cause(self) -> str:
        """Return why the attempt failed: the error of the rank that failed first."""
        ...

    @property
    def first_failed(self) -> int | None:
        """The rank that failed first."""
        ...

    def describe(self) -> str:
        """Describe an abnormal state of the ranks, such as a halted one; return "" if all seem to work."""
        ...

    def dump_stacks(self, file: Path) -> None:
        """Write the stacks of every rank to a file, to show why the attempt makes no progress."""
        ...

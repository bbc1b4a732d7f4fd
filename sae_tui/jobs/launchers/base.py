"""The interface through which the supervisor controls an attempt's ranks, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from sae_tui.jobs.ending import RankEnding
from sae_tui.jobs.launchers.early_ranks import EarlyRanks
from sae_tui.jobs.launchers.requeues import Interruption
from trainer.contract.paths import RunPaths
from trainer.contract.process import ProcessRef
from trainer.contract.runs.rank_spec import RankSpec, rank_command
from trainer.contract.settings.job import AnyJob
from trainer.contract.store.rows import Rank

RankCommand = Callable[[Path], Sequence[str]]


class AttemptSetup(msgspec.Struct, frozen=True):
    """Everything an attempt needs to start.

    `locks` contains the GPU lock descriptors. The ranks inherit these descriptors so that the GPUs stay locked
    while any rank is alive.
    """

    job_id: int
    config: AnyJob
    paths: RunPaths
    spec: RankSpec
    locks: tuple[int, ...] = ()
    command: RankCommand = rank_command
    # The ranks that were started before the job's turn.
    early: EarlyRanks | None = None
    # For a command: the job's GPUs, including simulated ones, and its program if it is already running. An adopted
    # program was not started as a job: it has another log, and processes that it leaves behind are not ended.
    gpu_uuids: tuple[str, ...] = ()
    running: ProcessRef | None = None
    is_adopted: bool = False


class Attempt(Protocol):
    """All ranks of an attempt. `wait` blocks for at most its timeout; on SLURM, other calls may take up to 15 s."""

    @property
    def alive(self) -> bool:
        """True while a process of the attempt may still be running."""
        ...

    @property
    def is_waiting(self) -> bool:
        """True while the attempt is pending in an external scheduler, and therefore takes no steps."""
        ...

    @property
    def is_halted(self) -> bool:
        """True if a rank is halted and cannot continue on its own."""
        ...

    @property
    def is_hung(self) -> bool:
        """True if a rank could not be killed; such a rank is treated as ended."""
        ...

    @property
    def has_failed(self) -> bool:
        """True if a rank exited prematurely, so the other ranks cannot continue."""
        ...

    @property
    def codes(self) -> set[int | None]:
        """The exit codes of all ranks: negative for a signal, None for a rank that is still running."""
        ...

    def start(self) -> None:
        """Start all ranks. After an `OSError` or `UserError`, the caller must stop any ranks already started."""
        ...

    def wait(self, timeout_s: float) -> list[Rank]:
        """Wait up to `timeout_s` seconds; return the ranks that exited or, on a cluster, started in the meantime."""
        ...

    def rows(self) -> list[Rank]:
        """Return all ranks as store rows."""
        ...

    def ask_to_stop(self) -> None:
        """Ask ranks that cannot read the store to save and stop."""
        ...

    def ask_to_finish(self) -> None:
        """Ask ranks that cannot read the store to cool down and finish early."""
        ...

    def end(self) -> None:
        """Ask all live ranks to stop; later calls kill them once their grace period has passed."""
        ...

    def endings(self) -> tuple[RankEnding, ...]: ...

    def interruption(self) -> Interruption | None:
        """Return why a cluster ended the attempt if the job is not at fault, so that it may be queued again."""
        ...

    def cause(self) -> str:
        """Return why the attempt failed: the error of the rank that failed first."""
        ...

    @property
    def first_failed(self) -> int | None:
        """The rank that failed first."""
        ...

    def describe(self) -> str:
        """Describe an abnormal rank state, such as a halted rank, or return "" if all ranks appear to be working."""
        ...

    def dump_stacks(self, file: Path) -> None:
        """Write every rank's stacks to a file, to show why the attempt is making no progress."""
        ...


class CommandAttempt(Attempt, Protocol):
    """An attempt of a command, whose only rank is its program."""

    @property
    def was_cut_short(self) -> str:
        """Why a scheduler asked the program to stop, as a predicate, or "" if none did."""
        ...

    def how(self) -> str:
        """Return how the program ended, as a predicate like `ended with exit code 2`."""
        ...

    def notes(self) -> list[str]:
        """Return what a user should know about an attempt that has ended."""
        ...

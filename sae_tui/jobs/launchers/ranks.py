"""The state of an attempt's ranks on any host: which are alive, how each has exited, and which failed first."""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

from sae_tui.jobs.ending import RankEnding
from sae_tui.jobs.launchers.base import AttemptSetup
from sae_tui.jobs.launchers.requeues import Interruption
from trainer.contract.process import ProcessRef
from trainer.contract.runs.rank_exit import RankEnd, first_failed
from trainer.contract.store.rows import Rank


class OneRank(RankEnd):
    """A rank with the fields of its row in the store."""

    @property
    @abstractmethod
    def ref(self) -> ProcessRef:
        """The rank's process."""

    def ending(self, n_ranks: int) -> RankEnding:
        code = self.code
        killed = code is not None and code < 0
        return RankEnding(
            rank=self.rank,
            exit_code=None if killed else code,
            exit_signal=-code if code is not None and killed else None,
            error=self.error(n_ranks) if self.failed else None,
        )


R = TypeVar("R", bound=OneRank)


class RankStates(Generic[R]):
    """The base class for attempts, with everything that does not depend on the ranks' host."""

    _processes = "its ranks"

    def __init__(self, setup: AttemptSetup) -> None:
        self._job_id, self._command = setup.job_id, setup.command
        self._paths, self._spec = setup.paths, setup.spec
        self.ranks: list[R] = []

    @property
    def living(self) -> list[R]:
        return [rank for rank in self.ranks if rank.ended is None]

    @property
    def alive(self) -> bool:
        return bool(self.living)

    @property
    def is_hung(self) -> bool:
        return any(rank.hangs for rank in self.ranks)

    @property
    def has_failed(self) -> bool:
        return any(rank.failed for rank in self.ranks)

    @property
    def codes(self) -> set[int | None]:
        return {rank.code for rank in self.ranks}

    @property
    def first_failed(self) -> int | None:
        first = first_failed(self.ranks)
        return first.rank if first else None

    def interruption(self) -> Interruption | None:
        return None

    def cause(self) -> str:
        first = first_failed(self.ranks)
        return first.error(len(self.ranks)) if first else f"{self._processes} had to be killed"

    def endings(self) -> tuple[RankEnding, ...]:
        return tuple(rank.ending(len(self.ranks)) for rank in self.ranks)

    def rows(self) -> list[Rank]:
        return [self._row(rank) for rank in self.ranks]

    def _row(self, rank: R) -> Rank:
        ending = rank.ending(len(self.ranks))
        return Rank(
            job_id=self._job_id,
            attempt=self._spec.attempt,
            rank=rank.rank,
            pid=rank.ref.pid,
            start_ticks=rank.ref.start_ticks,
            boot_id=rank.ref.boot_id,
            exit_code=ending.exit_code,
            exit_signal=ending.exit_signal,
            ended=rank.ended,
            error=ending.error,
        )

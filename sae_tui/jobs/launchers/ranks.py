"""What any attempt can tell of its ranks, wherever they run: who lives, how each ended, and who failed first."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from sae_tui.jobs.ending import RankEnding, signal_name
from sae_tui.jobs.launchers.base import Beginning
from trainer.contract.process import ProcessRef
from trainer.contract.ranks import EXIT_FINISHED, EXIT_STOPPED
from trainer.contract.records import Rank


class OneRank:
    """A rank, and how and when it ended; `exit_file` is where it leaves its last word."""

    def __init__(self, rank: int, exit_file: Path) -> None:
        self.rank = rank
        self.ended: float | None = None
        self.ended_by_us = False
        self._exit_file = exit_file

    @property
    @abstractmethod
    def ref(self) -> ProcessRef:
        """Its process."""

    @property
    @abstractmethod
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it lives."""

    @abstractmethod
    def failed_at(self) -> float:
        """When it failed, to be compared with the others."""

    @abstractmethod
    def last_line(self) -> str:
        """The last that it has printed."""

    @property
    def failed(self) -> bool:
        return self.code not in (None, EXIT_FINISHED, EXIT_STOPPED)

    @property
    def name(self) -> str:
        return f"rank {self.rank}"

    @property
    def word(self) -> str | None:
        """What it said itself of its failure."""
        try:
            left = msgspec.json.decode(self._exit_file.read_bytes(), type=dict[str, str | None])
        except (OSError, msgspec.MsgspecError):
            return None
        return left.get("error")

    def ending(self, n_ranks: int) -> RankEnding:
        code = self.code
        killed = code is not None and code < 0
        return RankEnding(
            rank=self.rank,
            exit_code=None if killed else code,
            exit_signal=-code if code is not None and killed else None,
            error=self.error(n_ranks) if self.failed else None,
        )

    def error(self, n_ranks: int) -> str:
        """Its own word, or else how it ended and the last that it printed."""
        if word := self.word:
            return f"{self.name}: {word}" if n_ranks > 1 else word
        line = self.last_line()
        return f"{self.name} {self.how()}" + (f"; its last log line: {line}" if line else "")

    def how(self) -> str:
        code = self.code or 0
        return f"was killed ({signal_name(-code)})" if code < 0 else f"ended with exit code {code}"


R = TypeVar("R", bound=OneRank)


class Ranks(Generic[R]):
    """The part of an attempt that follows from its ranks."""

    def __init__(self, beginning: Beginning) -> None:
        self._job_id, self._command = beginning.job_id, beginning.command
        self._paths, self._spec = beginning.paths, beginning.spec
        self.ranks: list[R] = []

    @property
    def living(self) -> list[R]:
        return [rank for rank in self.ranks if rank.ended is None]

    @property
    def alive(self) -> bool:
        return bool(self.living)

    @property
    def has_failed(self) -> bool:
        return any(rank.failed for rank in self.ranks)

    @property
    def codes(self) -> set[int | None]:
        return {rank.code for rank in self.ranks}

    @property
    def first_failed(self) -> int | None:
        first = self._first()
        return first.rank if first else None

    def cause(self) -> str:
        first = self._first()
        return first.error(len(self.ranks)) if first else "its ranks had to be ended"

    def endings(self) -> tuple[RankEnding, ...]:
        return tuple(rank.ending(len(self.ranks)) for rank in self.ranks)

    def rows(self) -> list[Rank]:
        return [self._row(rank) for rank in self.ranks]

    def _first(self) -> R | None:
        """Of those that failed by themselves the one that did before the others, which it may have cut off."""
        failed = [rank for rank in self.ranks if rank.failed and (rank.word or not rank.ended_by_us)]
        return min(failed, key=lambda rank: rank.failed_at(), default=None)

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

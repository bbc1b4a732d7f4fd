"""What the supervisor needs of the ranks of one attempt, whoever started them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from sae_tui.jobs.ending import RankEnding
from trainer.contract.process import ProcessRef

RankCommand = Callable[[Path], Sequence[str]]


class AttemptRank(Protocol):
    """One rank; `ref` is that of the host it runs on."""

    rank: int
    ref: ProcessRef
    ended: float | None

    @property
    def code(self) -> int | None:
        """Negative for a signal, None while it lives."""

    @property
    def failed(self) -> bool: ...


R = TypeVar("R", bound=AttemptRank)


class Attempt(Protocol[R]):
    """All ranks of an attempt."""

    ranks: list[R]

    @property
    def alive(self) -> list[R]: ...

    @property
    def has_failed(self) -> bool: ...

    def start(self, command: RankCommand, locks: Sequence[int]) -> None:
        """Starts every rank; raises OSError where that cannot be."""

    def wait(self, timeout_s: float) -> list[R]:
        """Within this time, the ranks of which there is news: that they ended, or on which host they run."""

    def ask_to_stop(self) -> None:
        """Passes on that they are to save and stop, where they do not see the request themselves."""

    def end(self) -> None:
        """Ends all that live; called again, with more force."""

    def ending(self, rank: R) -> RankEnding: ...

    def endings(self) -> tuple[RankEnding, ...]: ...

    def cause(self) -> str:
        """Why the attempt failed, in a sentence."""

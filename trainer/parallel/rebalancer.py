"""Finds ranks that keep the others waiting, reports them with the likely cause, and gives them less to do."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from trainer.contract.planning.plan import LATE
from trainer.contract.wording import gibibytes
from trainer.parallel.shares import Shares, by_speed

# A rank has to be late for so many log intervals and seconds before it is reported; a new division of the work has to
# promise its gain for as long.
PATIENCE, PATIENCE_S = 3, 3.0
LEAST_GAIN = 1.15
# The work is not divided anew when no rank's share grows by more than this factor.
LEAST_CHANGE = 1.05
# Shares of a rank's time that point to a cause.
MUCH_DATA, LITTLE_CORE = 0.3, 0.85
MUCH_MEMORY = 10**9
# More than this factor times an even share of the work.
MUCH_WORK = 1.1


class Event(NamedTuple):
    """Something worth a line in the job's history."""

    kind: str
    message: str
    level: str = "info"


class Verdict(NamedTuple):
    """What to report after an interval, and the new shares where a change is worth it."""

    events: list[Event]
    shares: Shares | None


class Balancer:
    """Judges every log interval; all ranks see the same figures and decide alike.

    `room` is the largest share of all latents that each rank has memory for.
    """

    def __init__(self, shares: Shares, *, rebalance: bool, room: Sequence[float] | None = None) -> None:
        self._shares, self._rebalance, self._room = shares, rebalance, room
        # Of each rank: for how many intervals and seconds it has been late without a break.
        self._late: dict[int, tuple[int, float]] = {}
        self._told: set[int] = set()
        self._seen: deque[tuple[float, list[float]]] = deque()

    def look(self, totals: dict[str, Tensor], seconds: float) -> Verdict:
        """Judge an interval of so many seconds and return what to report and how to share the work from now on.

        `totals` holds `busy_ms`, `data_ms`, `core_share` and `foreign_bytes`, each a vector with a value per rank.
        """
        busy, data = totals["busy_ms"].tolist(), totals["data_ms"].tolist()
        times = [own + waited for own, waited in zip(busy, data, strict=True)]
        if len(self._work()) != len(times):
            # Ranks with SAEs of their own have unlike work, and nothing to give away.
            return Verdict([], None)
        if not self._rebalance:
            return Verdict(self._stragglers(times, totals, seconds), None)
        self._remember(seconds, [work / time for work, time in zip(self._work(), times, strict=True)])
        return Verdict(self._stragglers(times, totals, seconds), self._better())

    def adopt(self, shares: Shares) -> None:
        """Take over the shares that are in use from now on, and forget what was measured with the old ones."""
        self._shares = shares
        self._seen.clear()
        self._late.clear()

    def _work(self, shares: Shares | None = None) -> list[float]:
        """Return the share of all work that each rank has, row by row."""
        tokens, latents = shares or self._shares
        whole = sum(tokens) * sum(latents)
        return [row * column / whole for row in tokens for column in latents]

    def _remember(self, seconds: float, speeds: list[float]) -> None:
        """Keep the newest intervals: at least `PATIENCE` of them and `PATIENCE_S` seconds."""
        self._seen.append((seconds, speeds))
        while len(self._seen) > PATIENCE and self._seen_s - self._seen[0][0] >= PATIENCE_S:
            self._seen.popleft()

    @property
    def _seen_s(self) -> float:
        return sum(seconds for seconds, _ in self._seen)

    def _stragglers(self, times: list[float], totals: dict[str, Tensor], seconds: float) -> list[Event]:
        """Return an event for each rank that has just been late for long enough, or that keeps up again."""
        typical, events = statistics.median_low(times), []
        for rank, time in enumerate(times):
            is_late = time > LATE * typical
            n_late, late_s = self._late.get(rank, (0, 0.0))
            self._late[rank] = (n_late + 1, late_s + seconds) if is_late else (0, 0.0)
            if rank in self._told and not is_late:
                self._told.remove(rank)
                events.append(Event("straggler", f"rank {rank} keeps up with the others again"))
            elif rank not in self._told and self._late[rank] >= (PATIENCE, 0) and self._late[rank][1] >= PATIENCE_S:
                self._told.add(rank)
                cause = _cause(rank, totals, self._work()[rank])
                message = f"rank {rank} takes {time / typical:.1f}× as long as the others: {cause}"
                events.append(Event("straggler", message, "warning"))
        return events

    def _better(self) -> Shares | None:
        """Return better shares, where the mean rank is done so much sooner than the last that a change is worth it.

        A part of a step does not shrink with a rank's share, so that it may take several changes to get there.
        """
        if len(self._seen) < PATIENCE or self._seen_s < PATIENCE_S:
            return None
        intervals = [of_ranks for _, of_ranks in self._seen]
        speeds = [statistics.fmean(of_rank) for of_rank in zip(*intervals, strict=True)]
        times = [work / speed for work, speed in zip(self._work(), speeds, strict=True)]
        if max(times) < LEAST_GAIN * statistics.fmean(times):
            return None
        wanted = by_speed(speeds, len(self._shares.latents), self._room)
        changes = [then / now for then, now in zip(self._work(wanted), self._work(), strict=True)]
        return wanted if max(changes) > LEAST_CHANGE else None


def _cause(rank: int, totals: dict[str, Tensor], work: float) -> str:
    """Return the likeliest cause, judged by the rank's own figures and its share `work` of all work."""
    own = {name: float(totals[name][rank]) for name in ("busy_ms", "data_ms", "core_share", "foreign_bytes")}
    if own["data_ms"] > MUCH_DATA * (own["busy_ms"] + own["data_ms"]):
        return f"it waits {own['data_ms']:.0f} ms of each step for data"
    if own["foreign_bytes"] > MUCH_MEMORY:
        return f"another process is on its GPU, with {gibibytes(own['foreign_bytes'])}"
    if 0 < own["core_share"] < LITTLE_CORE:
        return f"another process takes its core, of which it gets {own['core_share']:.0%}"
    if work > MUCH_WORK / len(totals["busy_ms"]):
        return f"it has {work:.0%} of the work"
    return "its device is slower or throttled"

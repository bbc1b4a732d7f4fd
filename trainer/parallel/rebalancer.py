"""Finds ranks that keep other ranks waiting, reports the likely cause, and assigns them less work."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from trainer.contract.planning.plan import LATE
from trainer.contract.wording import gibibytes
from trainer.parallel.shares import Shares, by_speed

# A rank is reported once it has been late for `PATIENCE` consecutive log intervals and for `PATIENCE_S` seconds. The
# work is redistributed only if the expected gain, averaged over such a period, is at least `LEAST_GAIN`.
PATIENCE, PATIENCE_S = 3, 3.0
LEAST_GAIN = 1.15
# The work is redistributed only if some rank's share would grow by more than this factor.
LEAST_CHANGE = 1.05
# Slow data is reported as the cause if a rank spends more than the fraction MUCH_DATA of its time waiting for data. A
# busy CPU core is reported as the cause if the rank gets less than the fraction LITTLE_CORE of the core.
MUCH_DATA, LITTLE_CORE = 0.3, 0.85
MUCH_MEMORY = 10**9
# The amount of work is reported as the cause if it exceeds this multiple of an even share.
MUCH_WORK = 1.1


class HistoryEvent(NamedTuple):
    """An entry in the job's history."""

    kind: str
    message: str
    level: str = "info"


class RebalanceDecision(NamedTuple):
    """The events to report after an interval, and new shares if a change is worthwhile."""

    events: list[HistoryEvent]
    shares: Shares | None


class Balancer:
    """Evaluates every log interval; all ranks get the same measurements and make the same decision.

    `capacity` is, for each rank, the largest fraction of all latents that fits into its memory.
    """

    def __init__(self, shares: Shares, *, rebalance: bool, capacity: Sequence[float] | None = None) -> None:
        self._shares, self._rebalance, self._capacity = shares, rebalance, capacity
        # For each late rank: the number of consecutive intervals in which it has been late, and their total duration in
        # seconds.
        self._late: dict[int, tuple[int, float]] = {}
        self._reported: set[int] = set()
        self._seen: deque[tuple[float, list[float]]] = deque()

    def look(self, totals: dict[str, Tensor], seconds: float) -> RebalanceDecision:
        """Evaluate an interval that lasted `seconds`; return the events to report and the new shares, if any.

        `totals` contains `busy_ms`, `data_ms`, `core_share` and `foreign_bytes`, each as a vector with one value per
        rank.
        """
        busy, data = totals["busy_ms"].tolist(), totals["data_ms"].tolist()
        times = [own + waited for own, waited in zip(busy, data, strict=True)]
        if len(self._work()) != len(times):
            # Ranks that train different SAEs cannot be compared and have no work to share.
            return RebalanceDecision([], None)
        if not self._rebalance:
            return RebalanceDecision(self._stragglers(times, totals, seconds), None)
        self._remember(seconds, [work / time for work, time in zip(self._work(), times, strict=True)])
        return RebalanceDecision(self._stragglers(times, totals, seconds), self._better())

    def adopt(self, shares: Shares) -> None:
        """Switch to new shares, and discard measurements made with the old shares."""
        self._shares = shares
        self._seen.clear()
        self._late.clear()

    def _work(self, shares: Shares | None = None) -> list[float]:
        """Return each rank's share of the total work, row by row."""
        tokens, latents = shares or self._shares
        whole = sum(tokens) * sum(latents)
        return [row * column / whole for row in tokens for column in latents]

    def _remember(self, seconds: float, speeds: list[float]) -> None:
        """Keep the latest intervals: at least `PATIENCE` intervals and `PATIENCE_S` seconds."""
        self._seen.append((seconds, speeds))
        while len(self._seen) > PATIENCE and self._seen_s - self._seen[0][0] >= PATIENCE_S:
            self._seen.popleft()

    @property
    def _seen_s(self) -> float:
        return sum(seconds for seconds, _ in self._seen)

    def _stragglers(self, times: list[float], totals: dict[str, Tensor], seconds: float) -> list[HistoryEvent]:
        """Return an event for each rank that has been late long enough to report, or has caught up again."""
        typical, events = statistics.median_low(times), []
        for rank, time in enumerate(times):
            is_late = time > LATE * typical
            n_late, late_s = self._late.get(rank, (0, 0.0))
            self._late[rank] = (n_late + 1, late_s + seconds) if is_late else (0, 0.0)
            if rank in self._reported and not is_late:
                self._reported.remove(rank)
                events.append(HistoryEvent("straggler", f"rank {rank} keeps up with the others again"))
            elif rank not in self._reported and self._late[rank] >= (PATIENCE, 0) and self._late[rank][1] >= PATIENCE_S:
                self._reported.add(rank)
                cause = _cause(rank, totals, self._work()[rank])
                message = f"rank {rank} takes {time / typical:.1f}× as long as the others: {cause}"
                events.append(HistoryEvent("straggler", message, "warning"))
        return events

    def _better(self) -> Shares | None:
        """Return better shares if the slowest rank takes at least `LEAST_GAIN` times the mean time, otherwise None.

        Part of a step's time does not depend on a rank's share, so several changes may be needed to balance the ranks.
        """
        if len(self._seen) < PATIENCE or self._seen_s < PATIENCE_S:
            return None
        intervals = [of_ranks for _, of_ranks in self._seen]
        speeds = [statistics.fmean(of_rank) for of_rank in zip(*intervals, strict=True)]
        times = [work / speed for work, speed in zip(self._work(), speeds, strict=True)]
        if max(times) < LEAST_GAIN * statistics.fmean(times):
            return None
        wanted = by_speed(speeds, len(self._shares.latents), self._capacity)
        changes = [then / now for then, now in zip(self._work(wanted), self._work(), strict=True)]
        return wanted if max(changes) > LEAST_CHANGE else None


def _cause(rank: int, totals: dict[str, Tensor], work: float) -> str:
    """Return the likely reason for a rank's lateness, given its measurements and its share `work` of the total work."""
    own = {name: float(totals[name][rank]) for name in ("busy_ms", "data_ms", "core_share", "foreign_bytes")}
    if own["data_ms"] > MUCH_DATA * (own["busy_ms"] + own["data_ms"]):
        return f"it waits {own['data_ms']:.0f} ms of each step for data"
    if own["foreign_bytes"] > MUCH_MEMORY:
        return f"another process uses its GPU and occupies {gibibytes(own['foreign_bytes'])}"
    if 0 < own["core_share"] < LITTLE_CORE:
        return f"another process uses its CPU core, so it gets only {own['core_share']:.0%} of the core"
    if work > MUCH_WORK / len(totals["busy_ms"]):
        return f"it has {work:.0%} of the work"
    return "its device is slower or throttled"

"""Ranks that keep the others waiting: found, told with the likely cause, and given less to do."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from trainer.parallel.shares import Shares, by_speed

# A rank whose own work takes so many times the median's is late.
LATE = 1.2
# Late for so many log intervals, and for so long, is no accident; the same holds for what sharing anew would gain.
PATIENCE, PATIENCE_S = 3, 3.0
LEAST_GAIN = 1.15
# A share that grows by less is none that could make the difference.
LEAST_CHANGE = 1.05
# Shares of a rank's time that point to a cause.
MUCH_DATA, LITTLE_CORE = 0.3, 0.85
MUCH_MEMORY = 10**9
# Of an even share of the work.
MUCH_WORK = 1.1


class Event(NamedTuple):
    """Something worth a line in the job's history."""

    kind: str
    message: str
    level: str = "info"


class Verdict(NamedTuple):
    """What to tell after an interval, and how to share from now on where that is worth it."""

    events: list[Event]
    shares: Shares | None


class Balancer:
    """Looks at every log interval; all ranks see the same figures and decide alike.

    `room` is the largest share of all latents that each rank has memory for.
    """

    def __init__(self, shares: Shares, *, rebalance: bool, room: Sequence[float] | None = None) -> None:
        self._shares, self._rebalance, self._room = shares, rebalance, room
        # Of each rank: for how many intervals and seconds it has been late without a break.
        self._late: dict[int, tuple[int, float]] = {}
        self._told: set[int] = set()
        self._seen: deque[tuple[float, list[float]]] = deque()

    def look(self, totals: dict[str, Tensor], seconds: float) -> Verdict:
        """From `busy_ms`, `data_ms`, `core_share`, `foreign_bytes` of all ranks, over so many seconds."""
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
        """From now on ranks share so, and what was seen before no longer counts."""
        self._shares = shares
        self._seen.clear()
        self._late.clear()

    def _work(self, shares: Shares | None = None) -> list[float]:
        """What each rank has of all work, row by row."""
        tokens, latents = shares or self._shares
        whole = sum(tokens) * sum(latents)
        return [row * column / whole for row in tokens for column in latents]

    def _remember(self, seconds: float, speeds: list[float]) -> None:
        """Keep the newest intervals, as many as patience asks for."""
        self._seen.append((seconds, speeds))
        while len(self._seen) > PATIENCE and self._seen_s - self._seen[0][0] >= PATIENCE_S:
            self._seen.popleft()

    @property
    def _seen_s(self) -> float:
        return sum(seconds for seconds, _ in self._seen)

    def _stragglers(self, times: list[float], totals: dict[str, Tensor], seconds: float) -> list[Event]:
        """Each is told once when it has been late for long enough, and once when it keeps up again."""
        typical, found = statistics.median_low(times), []
        for rank, time in enumerate(times):
            is_late = time > LATE * typical
            n_late, late_s = self._late.get(rank, (0, 0.0))
            self._late[rank] = (n_late + 1, late_s + seconds) if is_late else (0, 0.0)
            if rank in self._told and not is_late:
                self._told.remove(rank)
                found.append(Event("straggler", f"rank {rank} keeps up with the others again"))
            elif rank not in self._told and self._late[rank] >= (PATIENCE, 0) and self._late[rank][1] >= PATIENCE_S:
                self._told.add(rank)
                cause = _cause(rank, totals, self._work()[rank])
                message = f"rank {rank} takes {time / typical:.1f}× as long as the others: {cause}"
                found.append(Event("straggler", message, "warning"))
        return found

    def _better(self) -> Shares | None:
        """Other shares, where the mean rank is done so much sooner than the last that it is worth it.

        A part of a step does not shrink with a rank's share, so that it may take several changes to get there.
        """
        if len(self._seen) < PATIENCE or self._seen_s < PATIENCE_S:
            return None
        speeds = [statistics.fmean(of_rank) for of_rank in zip(*(found for _, found in self._seen), strict=True)]
        times = [work / speed for work, speed in zip(self._work(), speeds, strict=True)]
        if max(times) < LEAST_GAIN * statistics.fmean(times):
            return None
        wanted = by_speed(speeds, len(self._shares.latents), self._room)
        changes = [then / now for then, now in zip(self._work(wanted), self._work(), strict=True)]
        return wanted if max(changes) > LEAST_CHANGE else None


def _cause(rank: int, totals: dict[str, Tensor], work: float) -> str:
    """The likeliest, from what the rank knows of itself and what it has of all work."""
    own = {name: float(totals[name][rank]) for name in ("busy_ms", "data_ms", "core_share", "foreign_bytes")}
    if own["data_ms"] > MUCH_DATA * (own["busy_ms"] + own["data_ms"]):
        return f"it waits {own['data_ms']:.0f} ms of each step for data"
    if own["foreign_bytes"] > MUCH_MEMORY:
        return f"another process is on its GPU, with {own['foreign_bytes'] / 1e9:.1f} GB"
    if 0 < own["core_share"] < LITTLE_CORE:
        return f"another process takes its core, of which it gets {own['core_share']:.0%}"
    if work > MUCH_WORK / len(totals["busy_ms"]):
        return f"it has {work:.0%} of the work"
    return "its device is slower or throttled"

"""Simulates days of a machine's queue: users submit jobs, `turns` decides, and time jumps from event to event."""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from sae_tui.jobs.queue.fair import AGED_S, WINDOW_S, Standing
from sae_tui.jobs.queue.order import QueueGpu, turns
from sae_tui.policy import Limits
from trainer.contract.store.rows import GpuUse, Job, Lease
from trainer.contract.store.states import JobState

GIB = 2**30
HOUR_S, DAY_S = 3600.0, 86_400.0
BEGIN = 20_000 * DAY_S
# While GPUs are free and jobs wait, the queue is also planned at this interval, because the order changes with time.
TICK_S = 600.0


class SimJob(msgspec.Struct, frozen=True):
    """A job with its submission time and its real duration."""

    row: Job
    runs_s: float


class Ran(msgspec.Struct, frozen=True):
    """A job that has run; its times are in seconds since the epoch."""

    row: Job
    started: float
    ended: float
    uuids: tuple[str, ...]

    @property
    def waited_s(self) -> float:
        return self.started - (self.row.queued or 0.0)

    @property
    def gpu_s(self) -> float:
        return (self.ended - self.started) * len(self.uuids)

    def use(self, now: float) -> GpuUse:
        state = JobState.FINISHED if self.ended <= now else JobState.RUNNING
        return GpuUse(
            id=self.row.id, user=self.row.user, state=state, priority=self.row.priority, queued=self.row.queued,
            started=self.started, ended=self.ended if state.is_final else None, n_gpus=len(self.uuids),
        )  # fmt: skip


class Simulation:
    """Runs jobs on GPUs until all have ended; `ran` contains them in the order of their starts."""

    def __init__(self, jobs: Iterable[SimJob], n_gpus: int = 8, limits: Limits | None = None) -> None:
        self._coming = sorted(jobs, key=lambda job: (job.row.queued, job.row.id))
        self._gpus = [f"GPU-{index}" for index in range(n_gpus)]
        self._limits = limits or Limits()
        self._waiting: dict[int, SimJob] = {}
        self._running: dict[int, Ran] = {}
        self._recent: list[Ran] = []
        self.ran: list[Ran] = []
        self.now = BEGIN
        self.n_plans = 0

    def run(self) -> list[Ran]:
        while self._coming or self._waiting or self._running:
            self._advance()
            self._plan()
        return self.ran

    def _advance(self) -> None:
        """Jump to the next time at which a job arrives or ends, or at which the order may have changed."""
        times = [ran.ended for ran in self._running.values()]
        times += [self._coming[0].row.queued or 0.0] if self._coming else []
        times += [self.now + TICK_S] if self._waiting and len(self._held()) < len(self._gpus) else []
        self.now = max(self.now, min(times))
        self._running = {job_id: ran for job_id, ran in self._running.items() if ran.ended > self.now}
        while self._coming and (self._coming[0].row.queued or 0.0) <= self.now:
            job = self._coming.pop(0)
            self._waiting[job.row.id] = job

    def _held(self) -> dict[str, Ran]:
        return {uuid: ran for ran in self._running.values() for uuid in ran.uuids}

    def _plan(self) -> None:
        if not self._waiting:
            return
        self.n_plans += 1
        board, standing = self.board(), self.standing()
        for job_id, turn in turns([job.row for job in self._waiting.values()], board, self.now, standing).items():
            if not turn.waits_for:
                self._start(self._waiting.pop(job_id), tuple(gpu.uuid for gpu in turn.gpus))

    def _start(self, job: SimJob, uuids: tuple[str, ...]) -> None:
        held = self._held()
        assert not held.keys() & set(uuids), "a GPU is given twice"
        assert len(set(uuids)) == job.row.gpus_wanted
        ran = Ran(job.row, self.now, self.now + job.runs_s, uuids)
        self._running[job.row.id] = ran
        self._recent.append(ran)
        self.ran.append(ran)
        self._check_limits(job.row)

    def _check_limits(self, row: Job) -> None:
        mine = sum(len(ran.uuids) for ran in self._running.values() if ran.row.user == row.user)
        assert mine <= (self._limits.gpus_per_user or math.inf)
        if row.array is not None and row.array_limit:
            assert sum(ran.row.array == row.array for ran in self._running.values()) <= row.array_limit

    def board(self) -> list[QueueGpu]:
        held = self._held()
        return [self._gpu(index, uuid, held.get(uuid)) for index, uuid in enumerate(self._gpus)]

    def _gpu(self, index: int, uuid: str, ran: Ran | None) -> QueueGpu:
        if ran is None:
            return QueueGpu(index, uuid, 80 * GIB)
        lease = Lease(
            host="box", gpu_uuid=uuid, gpu_index=index, job_id=ran.row.id, user=ran.row.user, pid=1, since=ran.started
        )
        left_s = math.inf if ran.row.expected_s is None else max(0.0, ran.started + ran.row.expected_s - self.now)
        return QueueGpu(index, uuid, 80 * GIB, leases=(lease,), frees_in_s=left_s)

    def standing(self) -> Standing:
        self._recent = [ran for ran in self._recent if ran.ended > self.now - WINDOW_S]
        active: dict[int, int] = defaultdict(int)
        for ran in self._running.values():
            if ran.row.array is not None:
                active[ran.row.array] += 1
        return Standing(tuple(ran.use(self.now) for ran in self._recent), (), active, {}, self._limits)


def crowd(n_jobs: int = 1000, n_users: int = 8, days: float = 5.0, seed: int = 0) -> list[SimJob]:
    """Return the jobs of several users: half of them arrive at once from the first user, the others over several days.

    Half of the durations are unknown, and the others are wrong by up to a factor of 3. A few jobs need all GPUs, and a
    few have a different priority.
    """
    source = random.Random(seed)
    jobs = []
    for number in range(1, n_jobs + 1):
        is_flood = number <= n_jobs // 2
        user = 0 if is_flood else source.randrange(1, n_users)
        size = 1 if is_flood else source.choice((1, 1, 1, 1, 2, 2, 4, 8))
        runs_s = min(8 * HOUR_S, source.lognormvariate(math.log(HOUR_S), 0.8))
        comes = BEGIN if is_flood else BEGIN + source.random() * days * DAY_S
        expected_s = runs_s * source.uniform(1 / 3, 3) if source.random() < 0.5 else None
        priority = 0 if is_flood else source.choice((0,) * 18 + (1, -1))
        jobs.append(SimJob(sim_row(number, f"user{user}", size, comes, expected_s, priority=priority), runs_s))
    return jobs


def sim_row(
    number: int, user: str, n_gpus: int, queued: float, expected_s: float | None = None, **fields: object
) -> Job:
    values: dict[str, Any] = {"name": "job", "config": "", "host": "box", "device": "cuda", "gpu_source": "auto"}
    values |= {"any_gpus": True, "gpus_wanted": n_gpus, "expected_s": expected_s} | fields
    return Job(id=number, user=user, queued=queued, **values)


def oldest_since(ran: Sequence[Ran]) -> dict[int, float]:
    """Return, by job id, the time at which each job became its user's oldest waiting job of its priority."""
    lanes: dict[tuple[str, int], list[Ran]] = defaultdict(list)
    for one in ran:
        lanes[one.row.user, one.row.priority].append(one)
    since: dict[int, float] = {}
    for lane in lanes.values():
        lane.sort(key=lambda one: (one.row.queued, one.row.id))
        for place, one in enumerate(lane):
            before = [older.started for older in lane[:place]]
            since[one.row.id] = max([one.row.queued or 0.0, *before])
    return since


def promised_s(one: Ran, since: float, ran: Sequence[Ran], n_users: int) -> float:
    """Return the longest time a job may wait once it is its user's oldest; jobs of higher priority may delay it."""
    longest_s = max(each.ended - each.started for each in ran)
    above = [each for each in ran if each.row.priority > one.row.priority and each.ended > since]
    delays_s = sum(each.ended - each.started for each in above if each.started <= one.started)
    return AGED_S + n_users * longest_s + delays_s


def shares_by_day(ran: Sequence[Ran]) -> list[dict[str, float]]:
    """Return, for each day, the GPU hours of each user who had a job in the queue for the whole day."""
    end = max(one.started for one in ran)
    days = []
    begin = BEGIN
    while begin + DAY_S <= end:
        until = begin + DAY_S
        users = {one.row.user for one in ran}
        always = [user for user in users if _is_always_waiting(user, ran, begin, until)]
        days.append({user: _gpu_hours(user, ran, begin, until) for user in sorted(always)})
        begin = until
    return days


def _is_always_waiting(user: str, ran: Sequence[Ran], begin: float, until: float) -> bool:
    covered = begin
    for one in sorted((one for one in ran if one.row.user == user), key=lambda one: one.row.queued or 0.0):
        if (one.row.queued or 0.0) <= covered:
            covered = max(covered, one.started)
    return covered >= until


def _gpu_hours(user: str, ran: Sequence[Ran], begin: float, until: float) -> float:
    mine = [one for one in ran if one.row.user == user]
    return sum(max(0.0, min(one.ended, until) - max(one.started, begin)) * len(one.uuids) for one in mine) / HOUR_S


def waits_by_user(ran: Sequence[Ran]) -> Mapping[str, list[float]]:
    """Return the sorted waiting times of each user's jobs in seconds."""
    waits: dict[str, list[float]] = defaultdict(list)
    for one in ran:
        heapq.heappush(waits[one.row.user], one.waited_s)
    return {user: sorted(times) for user, times in sorted(waits.items())}

"""The order of the queue among users, and the limits on how much of the machine a user or an array may use at once.

Among jobs with the same priority, users with less GPU time in the last day go first. A user's own jobs are ordered by
age. No user starves: a job that has been its user's oldest waiting job for `AGED_S` goes ahead of users with less GPU
time. Only jobs that have been in this position for longer, at most one per other user, still go ahead of it.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from sae_tui.jobs.gpus.availability import locked_elsewhere
from sae_tui.jobs.output import time_limit_s
from sae_tui.policy import Limits, read_policy
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control, limit_of_array, limit_of_user
from trainer.contract.store.rows import GpuUse, Job, Lease
from trainer.contract.store.states import JobState
from trainer.contract.wording import duration, plural

# GPU time used longer ago than this is ignored.
WINDOW_S = 86_400.0
# After a job has been its user's oldest waiting job for this long, users with less GPU time no longer go ahead of it.
AGED_S = WINDOW_S
# Until a job ends, it counts as having run for at least this long. Otherwise, one user's jobs would get all GPUs that
# are free at the same time.
LEAST_S = 600.0
# GPU time is compared in whole minutes up to the last full minute, so that all processes reach the same result.
MINUTE_S = 60
# After a job has waited this long, other jobs can no longer pass it.
BACKFILL_S = 3600.0


class Standing(msgspec.Struct, frozen=True):
    """What each user has used and now holds, and the limits that apply now.

    `past` contains the last day's GPU use, including that of active jobs, and `leases` contains the GPUs held by jobs.
    `active` is the number of active jobs in each array. `elsewhere` contains, for each user, the UUIDs of GPUs held by
    jobs from other data folders. `largest` contains the limits that no job can exceed at any time.
    """

    past: tuple[GpuUse, ...] = ()
    leases: tuple[Lease, ...] = ()
    active: Mapping[int, int] = {}
    elsewhere: Mapping[str, frozenset[str]] = {}
    limits: Limits = Limits()
    largest: Limits = Limits()

    def most_gpus(self, user: str) -> int | None:
        """Return how many GPUs a user's jobs in this data folder may hold, or None if there is no limit."""
        most = self.limits.gpus_per_user
        return None if most is None else most - len(self.elsewhere.get(user, ()))


NOTHING_USED = Standing()


def read_standing(
    data: DataDir,
    control: Control,
    host: str,
    active: Collection[Job],
    unleased: Iterable[str],
    locks: Path,
    now: float,
) -> Standing:
    """Return all users' standing on a host.

    `active` contains the unfinished jobs in this data folder, `unleased` the UUIDs of the GPUs that none of them holds,
    and `locks` is the folder with the GPU locks.
    """
    started = [job for job in active if job.state != JobState.QUEUED]
    policy = read_policy(data)
    limits = policy.limits(now)
    # A job in this data folder may hold a lock, but not yet the lease.
    own = {job.supervisor_pid for job in active if job.supervisor_pid}
    return Standing(
        past=tuple(control.gpu_use(host, now - WINDOW_S)),
        leases=tuple(lease for lease in control.leases() if lease.host == host),
        active=Counter(job.array for job in started if job.array is not None),
        elsewhere={} if limits.gpus_per_user is None else locked_elsewhere(locks, unleased, own),
        limits=limits,
        largest=policy.largest,
    )


def gpu_seconds(past: Iterable[GpuUse], now: float) -> dict[str, float]:
    """Return the GPU-seconds that each user has used in the day before the last full minute."""
    until = now // MINUTE_S * MINUTE_S
    used: dict[str, float] = defaultdict(float)
    for use in past:
        used[use.user] += _seconds(use, until - WINDOW_S, until)
    return used


def _seconds(use: GpuUse, begin: float, until: float) -> float:
    """Return the GPU-seconds that a job has used between two times."""
    if use.state == JobState.QUEUED:
        # The row of a paused or resumed job does not say when the job ended, but its energy meter has measured how long
        # it held its GPUs.
        at_most = _overlap(use.started, use.queued or use.started, begin, until) * use.n_gpus
        return min(at_most, use.energy_s or 0.0)
    if use.state.is_final:
        return _overlap(use.started, use.ended or use.started, begin, until) * use.n_gpus
    return max(LEAST_S, _overlap(use.started, until, begin, until)) * use.n_gpus


def _overlap(start: float, end: float, begin: float, until: float) -> float:
    return max(0.0, min(end, until) - max(start, begin))


def age_key(job: Job) -> tuple[float, int]:
    """Return a key that sorts jobs by age, oldest first."""
    return job.queued or job.created, job.id


# Identifies a user's jobs with the same priority.
Lane = tuple[int, str]
Rank = tuple[float, ...]


class FairLine:
    """Yields queued jobs in the order in which they are planned; `charge` changes the order of the jobs that follow."""

    def __init__(self, line: Iterable[Job], standing: Standing, now: float) -> None:
        self._used, self._now = defaultdict(float, gpu_seconds(standing.past, now)), now
        self._starts = _Starts(standing.past)
        self._lanes: dict[Lane, Iterator[Job]] = {}
        self._charged: set[Lane] = set()
        in_lane = defaultdict(list)
        for job in sorted(line, key=age_key):
            in_lane[_lane(job)].append(job)
        self._lanes = {lane: iter(jobs) for lane, jobs in in_lane.items()}
        self._heap: list[tuple[Rank, Job]] = []

    def __iter__(self) -> Iterator[Job]:
        for lane in self._lanes:
            self._push_next(lane)
        while self._heap:
            rank, job = heapq.heappop(self._heap)
            if (now := self._rank(job)) > rank:
                # Another job of this user has been charged in the meantime.
                heapq.heappush(self._heap, (now, job))
                continue
            yield job
            self._push_next(_lane(job))

    def charge(self, job: Job) -> None:
        """Count a job that starts, or has reserved GPUs, as though it had already run for `LEAST_S`."""
        self._used[job.user] += LEAST_S * job.gpus_wanted
        self._charged.add(_lane(job))

    def _push_next(self, lane: Lane) -> None:
        if job := next(self._lanes[lane], None):
            # The id is part of the rank, so two jobs are never compared.
            heapq.heappush(self._heap, (self._rank(job), job))

    def _rank(self, job: Job) -> Rank:
        """Return a job's place in the line; smaller ranks come first, and a rank never becomes smaller."""
        lane = _lane(job)
        if lane not in self._charged and (job.queued or job.created) <= self._now - AGED_S:
            since = self._starts.oldest_since(job)
            if since <= self._now - AGED_S:
                return (-job.priority, 0, since, *age_key(job))
        return (-job.priority, 1, self._used[job.user] // MINUTE_S, *age_key(job))


def _lane(job: Job | GpuUse) -> Lane:
    return job.priority, job.user


class _Starts:
    """Determines since when a job has been its user's oldest waiting job: since an older job last started."""

    def __init__(self, past: Iterable[GpuUse]) -> None:
        in_lane = defaultdict(list)
        for use in past:
            if use.state != JobState.QUEUED and use.queued is not None:
                in_lane[_lane(use)].append((use.queued, use.started))
        self._queued: dict[Lane, list[float]] = {}
        self._last_start: dict[Lane, list[float]] = {}
        for lane, pairs in in_lane.items():
            pairs.sort()
            self._queued[lane] = [queued for queued, _ in pairs]
            self._last_start[lane] = list(itertools.accumulate((started for _, started in pairs), max))

    def oldest_since(self, job: Job) -> float:
        lane, queued = _lane(job), job.queued or job.created
        n_older = bisect.bisect_right(self._queued.get(lane, ()), queued)
        return max(queued, self._last_start[lane][n_older - 1]) if n_older else queued


class Claims:
    """Counts each user's GPUs and each array's active jobs while planning, including planned ones."""

    def __init__(self, standing: Standing, leases: Iterable[Lease], now: float) -> None:
        self._limits, self._largest, self._now = standing.limits, standing.largest, now
        self._held: dict[str, set[str]] = defaultdict(set)
        for user, uuids in standing.elsewhere.items():
            self._held[user] |= uuids
        for lease in (*standing.leases, *leases):
            self._held[lease.user].add(lease.gpu_uuid)
        self._active = defaultdict(int, standing.active)
        # The number of GPUs reserved for each user's waiting jobs; each array's jobs that wait for GPUs; and, for each
        # user, the job that has waited too long at the user's limit to be passed.
        self._reserved: dict[str, int] = defaultdict(int)
        self._waiting: dict[int, list[int]] = defaultdict(list)
        self._not_passed: dict[str, int] = {}

    def obstacle(self, job: Job) -> str:
        """Return which limit prevents a job from starting, or "" if none does."""
        return self._time_obstacle(job) or self._array_obstacle(job) or self._user_obstacle(job)

    def _time_obstacle(self, job: Job) -> str:
        most_s = self._limits.max_time_s if job.gpus_wanted else None
        limit_s = None if most_s is None else time_limit_s(job.config)
        if most_s is None or limit_s is None or limit_s <= most_s:
            return ""
        longest_s = self._largest.max_time_s
        if longest_s is not None and limit_s > longest_s:
            # The policy has changed since the launch. The job would wait forever, so its supervisor lowers its limit.
            return ""
        return f"its time limit is {duration(limit_s)}, but the policy allows only {duration(most_s)} now"

    def _array_obstacle(self, job: Job) -> str:
        if job.array is None or not job.queue_limit:
            return ""
        if (active := self._active[job.array]) >= job.queue_limit:
            return limit_of_array(job.array, active, job.queue_limit)
        waiting = self._waiting[job.array]
        return f"job {waiting[0]} is ahead in the queue" if active + len(waiting) >= job.queue_limit else ""

    def _user_obstacle(self, job: Job) -> str:
        most, held = self._limits.gpus_per_user, len(self._held[job.user])
        if most is None or not job.gpus_wanted:
            return ""
        if job.gpus_wanted > most:
            return f"it needs {plural(job.gpus_wanted, 'GPU')}, but the policy allows each user only {most} now"
        if job.user in self._not_passed:
            return f"job {self._not_passed[job.user]} is ahead in the queue"
        if held + job.gpus_wanted <= most:
            return ""
        if self._now - (job.queued or self._now) >= BACKFILL_S:
            self._not_passed[job.user] = job.id
        return limit_of_user(job.user, held, most, job.gpus_wanted)

    def may_reserve(self, job: Job) -> bool:
        """Return whether a waiting job could use its GPUs together with the GPUs held by and reserved for its user."""
        most = self._limits.gpus_per_user
        return most is None or len(self._held[job.user]) + self._reserved[job.user] + job.gpus_wanted <= most

    def start(self, job: Job, uuids: Iterable[str]) -> None:
        self._held[job.user].update(uuids)
        if job.array is not None:
            self._active[job.array] += 1

    def wait(self, job: Job, n_reserved: int) -> None:
        """Count a job that waits for GPUs, and the GPUs reserved for it."""
        self._reserved[job.user] += n_reserved
        if job.array is not None:
            self._waiting[job.array].append(job.id)

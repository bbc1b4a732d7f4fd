"""Decides which queued job starts next; given the same queue and GPUs, all processes reach the same decision.

Jobs are ordered by priority, then, as described in `fair`, by their users' GPU time, then by age. A job that cannot
start yet reserves the first suitable GPUs to become free. Other jobs may use reserved GPUs if they are expected to end
in time (backfill), until the waiting job has waited for `BACKFILL_S`.

Let D be the duration of the longest job. A job that stays first in the order starts within `BACKFILL_S` + D: once it
has waited for `BACKFILL_S`, every suitable GPU that becomes free is kept for it. With one user, this is the oldest job.
With U users, a user's oldest job starts within `AGED_S` + U * D: after `AGED_S`, at most one job from each other user
comes before it. These bounds apply among jobs of the same priority, to jobs that no limit holds back.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sae_tui.gpu import resolve
from sae_tui.gpu.visible import left_by
from sae_tui.jobs.queue.fair import BACKFILL_S, NOTHING_USED, Claims, FairLine, Standing, age_key
from trainer.contract.planning.gpu_vendors import is_slice
from trainer.contract.store.rows import Job, Lease
from trainer.contract.wording import gibibytes, join_words, plural


class QueueGpu(msgspec.Struct, frozen=True):
    """A GPU from the queue's point of view.

    `free_bytes` is the memory left free by other users, or None if unknown. `unusable` and `other_user` describe
    obstacles that remain after our jobs have ended. `frees_in_s` is the time until all our jobs on the GPU have ended.
    """

    index: int
    uuid: str
    free_bytes: int | None = None
    unusable: str = ""
    other_user: str = ""
    leases: tuple[Lease, ...] = ()
    frees_in_s: float = 0.0
    # The GPU's vendor, if the machine has GPUs from several vendors.
    vendor: str = ""
    takes_one_process: bool = False

    def has_memory(self, job: Job) -> bool:
        """Return whether a job fits in the memory left free by other users, regardless of our own jobs.

        If the free memory is unknown, return True for a job that names its GPUs, and False for a job that accepts any.
        """
        if self.free_bytes is None:
            return not job.any_gpus
        return job.card_memory_bytes is None or self.free_bytes >= job.card_memory_bytes

    def is_for(self, job: Job) -> bool:
        """Return whether a job can use this GPU once our other jobs have ended."""
        any_will_do = job.any_gpus and (job.takes_slices or not is_slice(self.uuid))
        wanted = any_will_do or self.uuid in job.gpu_uuids
        return wanted and not self.unusable and (job.shares_gpus or not self.other_user) and self.has_memory(job)

    def takes_now(self, job: Job) -> bool:
        if not self.leases:
            return True
        if self.takes_one_process:
            return False
        return job.shares_gpus and all(lease.shared for lease in self.leases) and self._has_capacity_left(job)

    def _has_capacity_left(self, job: Job) -> bool:
        taken = [lease.memory_bytes for lease in self.leases]
        if self.free_bytes is None or job.card_memory_bytes is None or None in taken:
            return False
        return self.free_bytes - sum(taken) >= job.card_memory_bytes  # type: ignore[arg-type]

    def with_job(self, job: Job) -> QueueGpu:
        """Return this GPU with an additional lease for a job that will start on it before the remaining jobs."""
        memory, in_s = job.card_memory_bytes, math.inf if job.expected_s is None else job.expected_s
        lease = Lease(
            host=job.host, gpu_uuid=self.uuid, gpu_index=self.index, job_id=job.id, user=job.user, pid=0, since=0.0,
            shared=job.shares_gpus, memory_bytes=memory,
        )  # fmt: skip
        return msgspec.structs.replace(self, leases=(*self.leases, lease), frees_in_s=max(self.frees_in_s, in_s))


class Turn(msgspec.Struct, frozen=True):
    """The GPUs that a job may use now, or its reason for waiting."""

    gpus: tuple[QueueGpu, ...] = ()
    waits_for: str = ""


class _Reservation(msgspec.Struct, frozen=True):
    """A GPU reservation for a waiting job; other jobs may use the GPU for the next `until_s` seconds."""

    job_id: int
    until_s: float


def in_order(line: Iterable[Job]) -> list[Job]:
    """Return jobs sorted by priority, then by age; this is the order in which one user's jobs start."""
    return sorted(line, key=lambda job: (-job.priority, *age_key(job)))


def turns(
    line: Iterable[Job], gpus: Iterable[QueueGpu], now: float, standing: Standing = NOTHING_USED
) -> dict[int, Turn]:
    """Return a dict mapping the id of every queued job to its turn, in the order of the queue.

    `now` is in seconds since the epoch. A job without GPUs may start if its turn has no reason for waiting.
    """
    plan, order = _Plan(gpus, now), FairLine(line, standing, now)
    claims = Claims(standing, plan.leases, now)
    turn_by_job: dict[int, Turn] = {}
    for job in order:
        if held_back := claims.obstacle(job):
            turn_by_job[job.id] = Turn(waits_for=held_back)
            continue
        turn, n_reserved = plan.place(job, may_reserve=claims.may_reserve(job))
        turn_by_job[job.id] = turn
        if turn.waits_for:
            claims.wait(job, n_reserved)
        else:
            claims.start(job, [gpu.uuid for gpu in turn.gpus])
        if n_reserved or turn.gpus:
            order.charge(job)
    return turn_by_job


class _Plan:
    """The state of the GPUs while planning: the jobs to start, and the reservations for waiting jobs."""

    def __init__(self, gpus: Iterable[QueueGpu], now: float) -> None:
        self._board = {gpu.uuid: gpu for gpu in sorted(gpus, key=lambda gpu: gpu.index)}
        self._now = now
        self._reservations: dict[str, _Reservation] = {}
        self._visible_to = functools.cache(functools.partial(_visible, tuple(self._board.values())))
        # The turns of jobs that can neither start nor reserve GPUs, by the result of `_alike`, which several jobs may
        # share.
        self._waiting: dict[tuple[object, ...], Turn] = {}
        self._until_s: list[float] = []

    @property
    def leases(self) -> Iterable[Lease]:
        return (lease for gpu in self._board.values() for lease in gpu.leases)

    def place(self, job: Job, *, may_reserve: bool) -> tuple[Turn, int]:
        """Start a job or reserve GPUs for it; return its turn and the number of reserved GPUs."""
        alike = self._alike(job)
        if turn := self._waiting.get(alike):
            return turn, 0
        gpus = [self._board[uuid] for uuid in self._visible_to(*_sight(job))]
        turn = _turn(job, gpus, self._reservations)
        kept = _keep(job, gpus, self._reservations, self._now) if turn.waits_for and may_reserve else {}
        if turn.gpus or kept:
            self._board |= {gpu.uuid: gpu.with_job(job) for gpu in turn.gpus}
            self._reservations |= kept
            self._until_s = sorted(reservation.until_s for reservation in self._reservations.values())
            self._waiting.clear()
        elif turn.waits_for and may_reserve:
            self._waiting[alike] = turn
        return turn, len(kept)

    def _alike(self, job: Job) -> tuple[object, ...]:
        """Return everything on which a waiting job's turn depends; its exact duration does not matter."""
        n_too_short = (
            len(self._until_s) if job.expected_s is None else bisect.bisect_left(self._until_s, job.expected_s)
        )
        named = () if job.any_gpus else job.gpu_uuids
        needs = (job.gpus_wanted, named, job.shares_gpus, job.takes_slices, job.card_memory_bytes)
        return (*_sight(job), *needs, n_too_short)


def _sight(job: Job) -> tuple[str | None, str]:
    """Return the value that limits the GPUs visible to a job, and their source; a job that names its GPUs sees all."""
    return (job.visible_devices, job.gpu_source) if job.any_gpus else (None, "")


def _visible(gpus: Sequence[QueueGpu], visible_devices: str | None, gpu_source: str) -> list[str]:
    """Return the UUIDs of the GPUs that a job may use; with `visible_devices`, only the GPUs visible at its launch."""
    if visible_devices is None:
        return [gpu.uuid for gpu in gpus]
    source = resolve(gpu_source)
    left = left_by(((gpu.index, gpu.uuid, gpu.vendor or source) for gpu in gpus), lambda _: visible_devices)
    return [gpu.uuid for gpu in gpus if gpu.index in left]


def _turn(job: Job, gpus: Sequence[QueueGpu], reservations: Mapping[str, _Reservation]) -> Turn:
    free = [gpu for gpu in gpus if gpu.is_for(job) and gpu.takes_now(job) and _is_open(job, gpu, reservations)]
    if len(free) < job.gpus_wanted:
        return Turn(waits_for=_reason(job, gpus, reservations))
    # Prefer GPUs without a reservation, then GPUs with more memory.
    free.sort(key=lambda gpu: (gpu.uuid in reservations, -(gpu.free_bytes or 0), gpu.index))
    return Turn(tuple(sorted(free[: job.gpus_wanted], key=lambda gpu: gpu.index)))


def _is_open(job: Job, gpu: QueueGpu, reservations: Mapping[str, _Reservation]) -> bool:
    """Return whether a job may use a GPU: it is not reserved, or the job would end early enough."""
    if gpu.uuid not in reservations:
        return True
    return job.expected_s is not None and job.expected_s <= reservations[gpu.uuid].until_s


def _keep(
    job: Job, gpus: Sequence[QueueGpu], reservations: Mapping[str, _Reservation], now: float
) -> dict[str, _Reservation]:
    """Reserve for a job the first suitable GPUs to become free; return the reservations by GPU UUID.

    If the job is waiting for other users' processes, whose end is unknown, return {}.
    """
    possible = [gpu for gpu in gpus if gpu.is_for(job) and gpu.uuid not in reservations]
    if len(possible) < job.gpus_wanted:
        return {}
    possible.sort(key=lambda gpu: (_ready_in_s(job, gpu), gpu.index))
    chosen = possible[: job.gpus_wanted]
    starts_in_s = max((_ready_in_s(job, gpu) for gpu in chosen), default=0.0)
    waited_s = now - (job.queued or now)
    until_s = starts_in_s if waited_s < BACKFILL_S else 0.0
    return {gpu.uuid: _Reservation(job.id, until_s) for gpu in chosen}


def _ready_in_s(job: Job, gpu: QueueGpu) -> float:
    return 0.0 if gpu.takes_now(job) else gpu.frees_in_s


def _reason(job: Job, gpus: Sequence[QueueGpu], reservations: Mapping[str, _Reservation]) -> str:
    """Return why a job is waiting, like `GPU 0 is held by job 3 (ann)`.

    If the job accepts any GPUs, the text includes a reason for each GPU: `2 GPUs: GPU 0 is …, GPU 1 is …`.
    """
    wanted = [gpu for gpu in gpus if job.any_gpus or gpu.uuid in job.gpu_uuids]
    missing = len(job.gpu_uuids) - len(wanted) if not job.any_gpus else 0
    reasons = [word for gpu in wanted if (word := _obstacle(job, gpu, reservations))]
    if missing > 0:
        reasons.append(f"{plural(missing, 'GPU')} of this job cannot be read")
    few = "this machine has fewer GPUs" if gpus else "no GPU can be read"
    text = join_words(list(dict.fromkeys(reasons))) if reasons else few
    return f"{plural(job.gpus_wanted, 'GPU')}: {text}" if job.any_gpus else text


def _obstacle(job: Job, gpu: QueueGpu, reservations: Mapping[str, _Reservation]) -> str:
    """Return why a job cannot use a GPU now, or "" if it can."""
    if gpu.unusable:
        return f"GPU {gpu.index} cannot be used ({gpu.unusable})"
    if job.any_gpus and not job.takes_slices and is_slice(gpu.uuid):
        return f"GPU {gpu.index} is a MIG slice"
    if gpu.other_user and not job.shares_gpus:
        return f"GPU {gpu.index} is {gpu.other_user}"
    if not gpu.has_memory(job) and gpu.free_bytes is None:
        return f"GPU {gpu.index} does not report its free memory; name it in launch.gpus to use it"
    if not gpu.has_memory(job):
        free, needed = gibibytes(gpu.free_bytes or 0), gibibytes(job.card_memory_bytes or 0)
        return f"GPU {gpu.index} has {free} free of {needed} needed"
    if not gpu.takes_now(job):
        holder = gpu.leases[0]
        if not holder.pid:
            return f"job {holder.job_id} is ahead in the queue"
        alone = ", which does not share it" if job.shares_gpus and not holder.shared else ""
        return f"GPU {gpu.index} is held by job {holder.job_id} ({holder.user}){alone}"
    return "" if _is_open(job, gpu, reservations) else f"job {reservations[gpu.uuid].job_id} is ahead in the queue"

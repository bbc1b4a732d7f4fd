"""Determines which GPUs are available for a new job, and why the other GPUs are not."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from sae_tui.jobs.gpus.locks import HolderReader, lock_holders, owner, user_of_process
from sae_tui.jobs.user import user_name
from trainer.contract.store.rows import Job, Lease, Rank
from trainer.contract.wording import gibibytes, join_words

if TYPE_CHECKING:
    from sae_tui.gpu.base import GpuProcess, GpuSample

# A process that uses less memory than this does not count as occupying a GPU: a desktop compositor or a monitoring
# program uses tens of MB.
FOREIGN_MEMORY_BYTES = 200 * 2**20


class GpuChoice(msgspec.Struct, frozen=True):
    """A GPU that a job may request; `reason` explains why it is unavailable, or what is unknown about it.

    `brief` is a shorter form of the reason, for lists. `memory_usable_bytes` is the memory available to jobs on the
    idle GPU, excluding memory reserved by the driver. `withheld` is True if only other users may use the GPU, and
    `is_unused` if its job has not used it for a long time.
    """

    index: int
    uuid: str
    name: str
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    state: Literal["available", "busy", "unhealthy"]
    job_id: int | None = None
    reason: str = ""
    memory_usable_bytes: int | None = None
    brief: str = ""
    vendor: str = ""
    withheld: bool = False
    is_unused: bool = False

    @property
    def may_be_offered(self) -> bool:
        """Whether a job that does not name this GPU may use it: the GPU must be idle and its free memory known."""
        return self.state == "available" and self.memory_free_bytes is not None


class Holders(msgspec.Struct, frozen=True):
    """The jobs in our own store that hold this machine's GPUs, and the pids of their ranks, by GPU UUID.

    If several jobs share a GPU, `jobs` contains the latest of them, and `shared` contains the ids of all of them.
    `own_pids` contains the pids of all our ranks, programs and supervisors, and `owners` maps each pid to its job.
    `other_users` describes the jobs from other data folders that hold a GPU, and `idle` describes how long a held GPU
    has been unused. `freed` contains, for each GPU, the time at which one of our jobs last ended on it.
    """

    jobs: Mapping[str, Job] = {}
    pids: Mapping[str, int] = {}
    leases: Mapping[str, Lease] = {}
    own_pids: frozenset[int] = frozenset()
    owners: Mapping[int, Job] = {}
    other_users: Mapping[str, str] = {}
    idle: Mapping[str, str] = {}
    freed: Mapping[str, float] = {}
    shared: Mapping[str, tuple[int, ...]] = {}

    def rank_of(self, pid: int) -> tuple[Job, int] | None:
        """Return the job and the rank number of the rank with this pid, or None if it is not one of our ranks."""
        uuid = next((uuid for uuid, one in self.pids.items() if one == pid), None)
        return None if uuid is None else (self.jobs[uuid], self.jobs[uuid].gpu_uuids.index(uuid))

    def job_of(self, pids: Iterable[int]) -> Job | None:
        """Return the job that one of these processes belongs to; `pids` lists a process and its ancestors.

        A process whose parent has exited becomes a child of its job's supervisor, so its job is still found.
        """
        return next((self.owners[pid] for pid in pids if pid in self.owners), None)

    def owns(self, process: GpuProcess) -> bool:
        """Return whether a process or one of its ancestors is one of our ranks, programs or supervisors."""
        return not self.own_pids.isdisjoint((process.pid, *process.ancestors))


def holders(jobs: Iterable[Job], leases: Iterable[Lease], ranks: Iterable[Rank]) -> Holders:
    """Return the holders of this machine's GPUs according to leases for unfinished jobs on this machine."""
    jobs = list(jobs)
    active = {job.id: job for job in jobs if not job.state.is_final}
    host = socket.gethostname()
    here = [lease for lease in leases if lease.host == host and lease.job_id in active]
    mine = {lease.gpu_uuid: lease for lease in here}
    ids = {uuid: tuple(lease.job_id for lease in here if lease.gpu_uuid == uuid) for uuid in mine}
    held = {uuid: active[lease.job_id] for uuid, lease in mine.items()}
    living = [rank for rank in ranks if rank.ended is None]
    pids = {
        uuid: rank.pid
        for rank in living
        for uuid, job in held.items()
        if (job.id, job.attempt) == (rank.job_id, rank.attempt) and job.gpu_uuids[rank.rank : rank.rank + 1] == (uuid,)
    }
    owners = {job.supervisor_pid: job for job in active.values() if job.supervisor_pid}
    owners |= {rank.pid: active[rank.job_id] for rank in living if rank.job_id in active}
    own = {rank.pid for rank in living} | owners.keys()
    freed: dict[str, float] = {}
    for job in jobs:
        freed |= {uuid: max(job.ended or 0.0, freed.get(uuid, 0.0)) for uuid in job.gpu_uuids if job.state.is_final}
    shared = {uuid: several for uuid, several in ids.items() if len(several) > 1}
    return Holders(held, pids, mine, frozenset(own), owners, freed=freed, shared=shared)


def with_other_users(held: Holders, folder: Path | HolderReader, samples: Iterable[GpuSample]) -> Holders:
    """Add the GPUs whose lock is held by a job outside our store; `folder` contains the locks, or is their reader."""
    uuids = [sample.uuid for sample in samples if sample.uuid not in held.jobs]
    pids = folder.read(uuids) if isinstance(folder, HolderReader) else lock_holders(folder, uuids)
    # If one of our jobs holds the lock but not yet the lease, it is recognised by its supervisor's pid.
    other_users = {uuid: f"held by a job of {owner(pid)}" for uuid, pid in pids.items() if pid not in held.own_pids}
    return msgspec.structs.replace(held, other_users=other_users) if other_users else held


def locked_elsewhere(folder: Path, unleased: Iterable[str], own_pids: Collection[int]) -> dict[str, frozenset[str]]:
    """Return, for each user, the UUIDs of the GPUs that jobs from other data folders have locked.

    `unleased` contains the UUIDs of the GPUs that no job in our own store holds.
    """
    found: dict[str, set[str]] = {}
    for uuid, pid in lock_holders(folder, unleased).items():
        if pid not in own_pids and (user := user_of_process(pid)):
            found.setdefault(user, set()).add(uuid)
    return {user: frozenset(uuids) for user, uuids in found.items()}


def choices(samples: Iterable[GpuSample], held: Holders) -> tuple[GpuChoice, ...]:
    """Return a `GpuChoice` for every GPU, in the order of the samples."""
    return tuple(_choice(sample, held) for sample in samples)


def describe_use(choice: GpuChoice) -> tuple[str, str]:
    """Return a short description of a GPU's use, and the name of the style in which to show it.

    Only a failing GPU and a GPU that its job does not use are shown as warnings.
    """
    if choice.state == "available":
        return choice.brief or "idle", "dim"
    if choice.state == "unhealthy" or choice.is_unused:
        return choice.brief, "warn"
    return choice.brief, "good" if choice.job_id is not None else "text"


def fit(choice: GpuChoice, needed_bytes: int) -> str:
    """Return why a job that needs `needed_bytes` does not fit in a GPU's free memory, or "" if it fits."""
    free = choice.memory_free_bytes
    if free is None:
        # 0 means that the job's memory requirement is not known yet.
        return f"needs {gibibytes(needed_bytes)}, free memory unknown" if needed_bytes else "free memory unknown"
    return "" if free >= needed_bytes else f"needs {gibibytes(needed_bytes)}, {gibibytes(free)} free"


def _choice(sample: GpuSample, held: Holders) -> GpuChoice:
    job = held.jobs.get(sample.uuid)
    state: Literal["available", "busy", "unhealthy"] = "available"
    reason = brief = ""
    if not sample.healthy:
        state, reason = "unhealthy", sample.reason or "it cannot be read"
    elif sample.obstacle:
        state, reason = "unhealthy", sample.obstacle
        short = sample.condition.trouble[1] if sample.condition and not sample.unusable else ""
        brief = f"{short}, job {job.id}" if job and short else short
    elif "uuid" in sample.failed:
        state, reason = "unhealthy", "its UUID cannot be read, but jobs are pinned to GPUs by UUID"
    elif job:
        idle = held.idle.get(sample.uuid)
        several = held.shared.get(sample.uuid)
        named = f"jobs {join_words(list(map(str, several)))}" if several else f"job {job.id} ({job.name})"
        state, reason = "busy", named + (f", {idle}" if idle else "")
    elif sample.uuid in held.other_users:
        state, reason = "busy", held.other_users[sample.uuid]
    elif foreign := _largest_foreign(_others(sample, held), held):
        state, reason = "busy", _used_by(foreign)
    elif taken := _taken_alone(sample, held):
        state, reason = "busy", taken
    elif _is_used_unseen(sample, held):
        state, reason = "busy", f"in use ({_use(sample)}) by an unseen process"
        brief = "in use, owner hidden"
    elif sample.processes is None:
        reason, brief = _unlisted_reason(sample)
    elif sample.is_latched:
        reason = f"no process uses it; the reading of {sample.utilization} % is stale until a program uses CUDA on it"
        brief = "idle, stale reading"
    return GpuChoice(
        index=sample.index,
        uuid=sample.uuid,
        name=sample.name,
        memory_total_bytes=sample.memory_total_bytes,
        memory_free_bytes=sample.memory_free_bytes,
        state=state,
        job_id=job.id if job else None,
        reason=reason,
        memory_usable_bytes=_usable(sample),
        brief=brief or reason,
        vendor=sample.vendor,
        withheld=sample.withheld,
        is_unused=state == "busy" and job is not None and sample.uuid in held.idle,
    )


def takes_one_process(sample: GpuSample) -> bool:
    """Return whether only one process at a time may compute on a GPU (exclusive compute mode)."""
    # Import late: lists of jobs read no GPUs, and this import takes a tenth of a command's start-up time.
    from sae_tui.gpu.base import ONE_PROCESS

    return sample.condition is not None and sample.condition.compute_mode == ONE_PROCESS


def _taken_alone(sample: GpuSample, held: Holders) -> str:
    """Describe the process that uses a GPU in exclusive compute mode, or return "".

    In exclusive compute mode, even a process that uses little memory occupies the GPU.
    """
    alone = [one for one in _others(sample, held) if not held.owns(one) and not _has_ended(one)]
    return f"{_used_by(alone[0])}; the GPU allows one process at a time" if takes_one_process(sample) and alone else ""


def _usable(sample: GpuSample) -> int | None:
    if sample.memory_free_bytes is None or sample.memory_used_bytes is None:
        return None
    return sample.memory_free_bytes + sample.memory_used_bytes


def _others(sample: GpuSample, held: Holders) -> Iterable[GpuProcess]:
    """Return the processes on a GPU; for a leased GPU, omit processes without a user name.

    A process without a user name may be a rank of the job that leases the GPU, if that job runs in a container.
    """
    processes = sample.processes or ()
    return [one for one in processes if one.user is not None] if sample.uuid in held.leases else processes


def _is_used_unseen(sample: GpuSample, held: Holders) -> bool:
    """Return whether an unlisted process must be using a GPU; return False if one of our jobs leases the GPU."""
    if sample.uuid in held.leases or not sample.is_used_unseen:
        return False
    # Ignore a reading taken before our last job on the GPU ended: it reflects that job's use of the GPU.
    freed = held.freed.get(sample.uuid)
    return freed is None or sample.timestamp > freed


def _use(sample: GpuSample) -> str:
    """Format a GPU's utilisation and used memory, like `98 %, 127.0 GiB`; omit unknown values."""
    shown = [] if sample.utilization is None else [f"{sample.utilization} %"]
    return ", ".join([*shown, *([] if sample.memory_used_bytes is None else [gibibytes(sample.memory_used_bytes)])])


def _unlisted_reason(sample: GpuSample) -> tuple[str, str]:
    """Return a long and a brief reason for a GPU that does not list its processes and shows no other sign of use."""
    if sample.memory_used_bytes is None:
        return "its use is unknown", "use unknown"
    return f"{gibibytes(sample.memory_used_bytes)} in use, its processes cannot be listed", "no use detected"


def _largest_foreign(processes: Iterable[GpuProcess], held: Holders) -> GpuProcess | None:
    """Return the process outside our jobs that uses the most memory, or None if all such processes use little memory.

    A process with unknown memory use is never assumed to use little memory.
    """
    large = [
        process
        for process in processes
        if not held.owns(process)
        and not _has_ended(process)
        and (process.memory_used_bytes is None or process.memory_used_bytes > FOREIGN_MEMORY_BYTES)
    ]
    return max(large, key=lambda process: process.memory_used_bytes or 0, default=None)


def _has_ended(process: GpuProcess) -> bool:
    """Return whether a process of this user has exited, although the last reading still lists it.

    Return False for other users' processes, whose pids may belong to another PID namespace.
    """
    return process.user is not None and process.user == user_name() and not os.path.exists(f"/proc/{process.pid}")


def _used_by(process: GpuProcess) -> str:
    details = f"pid {process.pid}" + (f", {process.name}" if process.name else "")
    return f"used by {process.user} ({details})" if process.user else f"used by another process ({details})"

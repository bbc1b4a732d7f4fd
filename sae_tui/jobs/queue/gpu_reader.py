"""Reads this machine's GPUs for all queued jobs, and combines the readings with leases and locks."""

from __future__ import annotations

import math
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sae_tui.gpu import AUTO, resolve
from sae_tui.gpu.base import GPU_LIMIT_S, OPEN_LIMIT_S, GpuSample, samples_of
from sae_tui.jobs.gpus.availability import GpuChoice, Holders, choices, takes_one_process
from sae_tui.jobs.gpus.locks import lock_holder, open_lock
from sae_tui.jobs.queue.order import QueueGpu
from sae_tui.jobs.supervisor_log import note
from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json, write_json
from trainer.contract.locks import try_lock
from trainer.contract.paths import DataDir
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.planning.hardware import slowest
from trainer.contract.process import ProcessRef, boot_id, state_of
from trainer.contract.store.rows import Job, Lease

# Taking a reading keeps a core busy for 0.1 s, so readings up to this age are reused.
FRESH_S = 5.0
# Readings up to this age may be used to look up a GPU's name, which does not change.
NAMED_S = 86_400.0
# The time limit for a read, which includes starting Python, opening the driver and reading a GPU.
READ_TIMEOUT_S = 10.0 + OPEN_LIMIT_S + GPU_LIMIT_S
# Samples may be this many seconds older than requested while another process is reading the GPUs.
LATE_S = 5.0
# How long a process that has responded may take to exit. Normally, it exits immediately.
END_S = 1.0
# The pause after a reading process has hung in the driver, and its maximum. Each further hung process doubles the
# pause.
STUCK_S, LONGEST_STUCK_S = 60.0, 3600.0


class GpuReader:
    """Reads a source's GPUs in a separate process; all jobs that wait for these GPUs share the readings."""

    def __init__(self, data: DataDir, source: str) -> None:
        self._source = source
        # Hosts that share the data folder have different GPUs, so each host has its own file.
        self._file = data.root / f"cards-{data.host_word}-{source.replace(':', '-')}.json"
        self._lock = data.locks / f"cards-{data.host_word}.lock"
        # Contains the list of processes hung in the driver.
        self._stuck_file = self._file.with_suffix(".stuck")
        # When another process was first seen holding the lock: the monotonic time, and the time of day as text.
        self._refused: tuple[float, str] | None = None
        # Why there are no samples, or "" if there are some.
        self.problem = ""

    def samples(self, fresh_s: float = FRESH_S) -> tuple[GpuSample, ...]:
        """Return samples that are at most `fresh_s` seconds old; read the GPUs if necessary.

        While another process is reading the GPUs, the samples may be up to `LATE_S` older than that. If there are no
        samples, return () and set `problem` to the reason.
        """
        self.problem = ""
        if not self._has_reading() or not 0 <= self._age_s() <= fresh_s:
            self._read()
        # Use `abs` so that an old reading is not considered fresh after the clock is set back.
        if not self._has_reading() or abs(self._age_s()) > fresh_s + LATE_S:
            self.problem = self.problem or "the reading could not be written"
            return ()
        return samples_of(read_json(self._file, list[msgspec.Raw]) or ())

    def _has_reading(self) -> bool:
        # A missing reading has infinite age and `fresh_s` may also be infinite, so check for it separately.
        return math.isfinite(self._age_s())

    def _age_s(self) -> float:
        """Return the age of the last reading in seconds.

        The age is negative if the clock was set back, and infinite if there is no reading.
        """
        try:
            return time.time() - self._file.stat().st_mtime
        except OSError:
            return math.inf

    def _read(self) -> None:
        """Read the GPUs, unless another process is reading them.

        The lock only avoids redundant reads. If its holder is halted or hangs, read the GPUs without the lock.
        """
        with open(open_lock(self._lock)) as lock:
            if _is_ours(lock.fileno()):
                self._refused = None
            else:
                self._refused = self._refused or (time.monotonic(), time.strftime("%H:%M:%S"))
                since, clock = self._refused
                if time.monotonic() - since <= READ_TIMEOUT_S + 2 * END_S:
                    self.problem = f"{_who(lock_holder(self._lock))} has been reading them since {clock}"
                    return
            self._run_reader()

    def _run_reader(self) -> None:
        stuck = [process for process in read_json(self._stuck_file, list[ProcessRef]) or () if _is_there(process)]
        if stuck and self._seconds_since_stuck() < min(LONGEST_STUCK_S, STUCK_S * 2 ** (len(stuck) - 1)):
            self.problem = f"{_who(stuck[-1].pid)} hangs in the driver and cannot be killed"
            return
        command = [sys.executable, "-P", "-m", "sae_tui.gpu.read", self._source]
        try:
            reader = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        except OSError as error:
            self._fail(str(error))
            return
        identity = ProcessRef.of(reader.pid)
        answer, complaint = _answer_of(reader, READ_TIMEOUT_S)
        if answer.endswith(b"\n"):
            write_whole(self._file, answer, durable=False)
        if not _has_ended(reader) and identity:
            note(f"process {reader.pid}, which read the GPUs, hangs in the driver and cannot be killed")
            write_json(self._stuck_file, [*stuck, identity])
        if not answer.endswith(b"\n"):
            self._file.unlink(missing_ok=True)
            self._fail(complaint or f"no response within {READ_TIMEOUT_S:g} s")

    def _fail(self, reason: str) -> None:
        self.problem = reason
        note(f"the GPUs could not be read: {reason}")

    def _seconds_since_stuck(self) -> float:
        try:
            return abs(time.time() - self._stuck_file.stat().st_mtime)
        except OSError:
            return math.inf


def _is_ours(lock: int) -> bool:
    """Acquire the lock; return False if another process holds it. Return True if locks are not supported."""
    try:
        return try_lock(lock)
    except OSError:
        return True


def _is_there(process: ProcessRef) -> bool:
    """Return whether a process still exists, as a killed process does if one of its threads is hung in the driver."""
    return process.boot_id == boot_id() and state_of(process.pid) != ""


def _who(pid: int | None) -> str:
    return f"process {pid}" if pid else "another process"


def _answer_of(reader: subprocess.Popen[bytes], limit_s: float) -> tuple[bytes, str]:
    """Return the line that a process prints, and its standard error. The line is complete if it ends with a newline.

    Do not wait for EOF: a hung thread keeps the pipe open.
    """
    assert reader.stdout is not None
    assert reader.stderr is not None
    written = {reader.stdout.fileno(): b"", reader.stderr.fileno(): b""}
    deadline = time.monotonic() + limit_s
    with reader.stdout as output, reader.stderr, selectors.DefaultSelector() as ready:
        for descriptor in written:
            ready.register(descriptor, selectors.EVENT_READ)
        while ready.get_map() and not written[output.fileno()].endswith(b"\n") and time.monotonic() < deadline:
            for key, _ in ready.select(deadline - time.monotonic()):
                chunk = os.read(key.fd, 1 << 16)
                written[key.fd] += chunk
                if not chunk:
                    ready.unregister(key.fd)
        answer, complaint = written.values()
    return answer, complaint.decode(errors="replace").strip()


def _has_ended(reader: subprocess.Popen[bytes]) -> bool:
    """Wait 1 s for a process to exit, then kill it; return False if it still exists after another second."""
    for end in (reader.kill, lambda: None):
        try:
            reader.wait(END_S)
            return True
        except subprocess.TimeoutExpired:
            end()
    return False


def vendor_of(data: DataDir, job: Job) -> str:
    """Return the key in `VENDORS` for a job's GPU vendor, or "" if the job has no GPUs or simulated ones."""
    if not job.gpu_uuids:
        return ""
    source = resolve(job.gpu_source)
    if source != AUTO:
        return source if source in VENDORS else ""
    # A GPU's vendor does not change, so a reading of any age will do.
    samples = GpuReader(data, source).samples(math.inf)
    return next((sample.vendor for sample in samples if sample.uuid == job.gpu_uuids[0]), "")


def name_of(data: DataDir, job: Job) -> str:
    """Return the name of a job's slowest GPU, or "" if the GPUs cannot be read."""
    samples = GpuReader(data, resolve(job.gpu_source)).samples(NAMED_S)
    return slowest([sample.name for sample in samples if sample.uuid in job.gpu_uuids] or [""])


def gpus(
    samples: Iterable[GpuSample], held: Holders, leases: Sequence[Lease], jobs: Mapping[int, Job]
) -> list[QueueGpu]:
    """Return a `QueueGpu` for every sample.

    A job that has just started has not allocated its memory yet, so only leases determine which GPUs our own jobs use.
    """
    ours = Holders(own_pids=held.own_pids, other_users=held.other_users, leases=held.leases, freed=held.freed)
    samples = list(samples)
    return [
        _gpu(sample, choice, [one for one in leases if one.gpu_uuid == sample.uuid], held, jobs)
        for sample, choice in zip(samples, choices(samples, ours), strict=True)
    ]


def named_gpus(queued: Iterable[Job], leases: Sequence[Lease], jobs: Mapping[int, Job]) -> list[QueueGpu]:
    """Return the GPUs named by queued jobs, with their leases but without readings."""
    gpus = {uuid: index for job in queued for index, uuid in zip(job.gpu_ids, job.gpu_uuids, strict=False)}
    leased = ((index, uuid, tuple(one for one in leases if one.gpu_uuid == uuid)) for uuid, index in gpus.items())
    return [QueueGpu(index, uuid, leases=mine, frees_in_s=_frees_in_s(mine, jobs)) for index, uuid, mine in leased]


def _gpu(
    sample: GpuSample, choice: GpuChoice, leases: Sequence[Lease], held: Holders, jobs: Mapping[int, Job]
) -> QueueGpu:
    return QueueGpu(
        index=sample.index,
        uuid=sample.uuid,
        free_bytes=_left_by_other_users(sample, choice, held, leases) if leases else sample.memory_free_bytes,
        unusable=choice.reason if choice.state == "unhealthy" else "",
        other_user=choice.reason if choice.state == "busy" else "",
        leases=tuple(leases),
        frees_in_s=_frees_in_s(leases, jobs),
        vendor=sample.vendor,
        takes_one_process=takes_one_process(sample),
    )


def _left_by_other_users(sample: GpuSample, choice: GpuChoice, held: Holders, leases: Iterable[Lease]) -> int | None:
    """Return how many bytes other users leave free on a GPU that our jobs use, or None if this is unknown.

    Our jobs are assumed to use all their leased memory, even before they allocate it. Memory used by processes without
    a user name is attributed to our jobs up to the size of the leases, and beyond that to other users.
    """
    if choice.memory_usable_bytes is None or sample.memory_used_bytes is None:
        return None
    named = [one for one in sample.processes or () if one.user is not None]
    theirs = sum(one.memory_used_bytes or 0 for one in named if not held.owns(one))
    nameless = sample.memory_used_bytes - sum(one.memory_used_bytes or 0 for one in named)
    return choice.memory_usable_bytes - theirs - max(0, nameless - sum(lease.memory_bytes or 0 for lease in leases))


def _frees_in_s(leases: Iterable[Lease], jobs: Mapping[int, Job]) -> float:
    """Return the expected number of seconds until the last job on a GPU ends, or infinity if this is unknown."""
    ends = [left_s(jobs[lease.job_id]) if lease.job_id in jobs else math.inf for lease in leases]
    return max(ends, default=0.0)


def left_s(job: Job) -> float:
    """Return the expected number of seconds until a started job ends, or infinity if this is unknown."""
    left = job.left_s if job.left_s is not None else job.expected_s
    return math.inf if left is None else left

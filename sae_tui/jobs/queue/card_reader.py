"""The cards of this machine as queued jobs see them: read once for all that wait, with leases and strangers added."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sae_tui.gpu import AUTO, resolve
from sae_tui.gpu.base import CARD_LIMIT_S, OPEN_LIMIT_S, GpuSample
from sae_tui.gpu.read import samples_of
from sae_tui.jobs.cards.availability import GpuChoice, Holders, choices, takes_one_process
from sae_tui.jobs.cards.locks import open_lock
from sae_tui.jobs.queue.order import Card
from sae_tui.jobs.supervisor_log import note
from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json
from trainer.contract.locks import try_lock
from trainer.contract.paths import DataDir
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.planning.hardware import slowest
from trainer.contract.store.rows import Job, Lease

# Strangers come and go within minutes; a reading costs 0.1 s of a core.
FRESH_S = 5.0
# Cards keep their names, but nobody may have read those that a job was given by their numbers.
NAMED_S = 86_400.0
# Python's own start, and what opening the driver and reading a card may take.
READ_TIMEOUT_S = 10.0 + OPEN_LIMIT_S + CARD_LIMIT_S


class CardReader:
    """Reads the GPUs of one source by a process of its own; all that wait for the same cards share the reading."""

    def __init__(self, data: DataDir, source: str) -> None:
        self._source = source
        # Another host that shares the folder has other GPUs.
        self._file = data.root / f"cards-{data.host_word}-{source.replace(':', '-')}.json"
        self._lock = data.locks / f"cards-{data.host_word}.lock"

    def samples(self, fresh_s: float = FRESH_S) -> tuple[GpuSample, ...]:
        """Return samples no older than `fresh_s`, unless somebody reads them just now; () where they cannot be read."""
        if not 0 <= self._age_s() <= fresh_s:
            self._read()
        return samples_of(read_json(self._file, list[msgspec.Raw]) or ())

    def _age_s(self) -> float:
        """Return the seconds since the reading; negative if the clock was set back, infinite without one."""
        try:
            return time.time() - self._file.stat().st_mtime
        except OSError:
            return math.inf

    def _read(self) -> None:
        with open(open_lock(self._lock)) as lock:
            if not try_lock(lock.fileno()):
                return
            command = [sys.executable, "-P", "-m", "sae_tui.gpu.read", self._source]
            try:
                done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=READ_TIMEOUT_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                note(f"the GPUs could not be read: {error}")
                return
            if done.returncode:
                note(f"the GPUs could not be read: {done.stderr.decode(errors='replace').strip()}")
                self._file.unlink(missing_ok=True)
            else:
                # Read again in a few seconds.
                write_whole(self._file, done.stdout, durable=False)


def vendor_of(data: DataDir, job: Job) -> str:
    """Return the vendor of the GPUs that a job has, by its name in `VENDORS`; "" for none and for simulated ones."""
    if not job.gpu_uuids:
        return ""
    source = resolve(job.gpu_source)
    if source != AUTO:
        return source if source in VENDORS else ""
    # Several vendors' cards: those of the job were read when it took them.
    samples = CardReader(data, source).samples(math.inf)
    return next((sample.vendor for sample in samples if sample.uuid == job.gpu_uuids[0]), "")


def name_of(data: DataDir, job: Job) -> str:
    """Return the name of the slowest GPU that a job has; "" where that cannot be read."""
    samples = CardReader(data, resolve(job.gpu_source)).samples(NAMED_S)
    return slowest([sample.name for sample in samples if sample.uuid in job.gpu_uuids] or [""])


def cards(samples: Iterable[GpuSample], held: Holders, leases: Sequence[Lease], jobs: Mapping[int, Job]) -> list[Card]:
    """Return a card for every sample.

    Of our own jobs only leases count: memory that they have not taken yet, in their first second, is not free.
    """
    ours = Holders(own_pids=held.own_pids, strangers=held.strangers, leases=held.leases, freed=held.freed)
    samples = list(samples)
    return [
        _card(sample, choice, [one for one in leases if one.gpu_uuid == sample.uuid], held, jobs)
        for sample, choice in zip(samples, choices(samples, ours), strict=True)
    ]


def named_cards(job: Job, leases: Sequence[Lease], jobs: Mapping[int, Job]) -> list[Card]:
    """Return the cards that a job names, of which nothing is known but their leases."""
    gpus = zip(job.gpu_ids, job.gpu_uuids, strict=False)
    leased = ((index, uuid, tuple(one for one in leases if one.gpu_uuid == uuid)) for index, uuid in gpus)
    return [Card(index, uuid, leases=mine, frees_in_s=_frees_in_s(mine, jobs)) for index, uuid, mine in leased]


def _card(
    sample: GpuSample, choice: GpuChoice, leases: Sequence[Lease], held: Holders, jobs: Mapping[int, Job]
) -> Card:
    return Card(
        index=sample.index,
        uuid=sample.uuid,
        free_bytes=_left_by_strangers(sample, choice, held, leases) if leases else sample.memory_free_bytes,
        unusable=choice.reason if choice.state == "unhealthy" else "",
        stranger=choice.reason if choice.state == "busy" else "",
        leases=tuple(leases),
        frees_in_s=_frees_in_s(leases, jobs),
        vendor=sample.vendor,
        takes_one_process=takes_one_process(sample),
    )


def _left_by_strangers(sample: GpuSample, choice: GpuChoice, held: Holders, leases: Iterable[Lease]) -> int | None:
    """Return the bytes that strangers leave of a card that our jobs use; None where it cannot be known.

    What our jobs take is told by their leases, from their first second on. Memory that no process with a user's name
    holds is theirs as far as their leases go, and beyond that a stranger's.
    """
    if choice.memory_usable_bytes is None or sample.memory_used_bytes is None:
        return None
    named = [one for one in sample.processes or () if one.user is not None]
    theirs = sum(one.memory_used_bytes or 0 for one in named if one.pid not in held.own_pids)
    nameless = sample.memory_used_bytes - sum(one.memory_used_bytes or 0 for one in named)
    return choice.memory_usable_bytes - theirs - max(0, nameless - sum(lease.memory_bytes or 0 for lease in leases))


def _frees_in_s(leases: Iterable[Lease], jobs: Mapping[int, Job]) -> float:
    """Return in how many seconds the last of the card's jobs is expected to end; infinite where that is unknown."""
    ends = [_left_s(jobs[lease.job_id]) if lease.job_id in jobs else math.inf for lease in leases]
    return max(ends, default=0.0)


def _left_s(job: Job) -> float:
    left = job.left_s if job.left_s is not None else job.expected_s
    return math.inf if left is None else left

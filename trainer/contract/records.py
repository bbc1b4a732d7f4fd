"""The rows of `control.db`: what is known of a job, its ranks, its GPUs and what happened to it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from trainer.contract.process import ProcessRef
from trainer.contract.states import JobState

_LIST_COLUMNS = ("gpu_ids", "gpu_uuids", "after", "tags")  # columns that hold a JSON list
_FLAG_COLUMNS = ("distributed", "held", "any_gpus", "shares_gpus")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `jobs`. Times are seconds since the epoch; `device` is "cuda" or "cpu"."""

    id: int = 0
    name: str
    state: JobState = JobState.QUEUED
    config: str
    user: str
    host: str
    device: str
    gpu_source: str
    gpu_ids: tuple[int, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    distributed: bool = False
    world_size: int = 1
    mode: str = "single"
    boot_id: str | None = None
    supervisor_pid: int | None = None
    supervisor_start: int | None = None
    attempt: int = 0
    parent: int | None = None
    created: float = 0.0
    started: float | None = None
    ended: float | None = None
    step: int = 0
    total_steps: int | None = None
    tokens: int = 0
    loss: float | None = None
    fvu: float | None = None
    l0: float | None = None
    dead_fraction: float | None = None
    tokens_per_s: float | None = None
    error: str | None = None
    output_path: str | None = None
    d_in: int | None = None
    d_out: int | None = None
    # Per rank; the peak is what PyTorch reserved on the fullest GPU, or what the fullest process held on the CPU.
    estimated_memory_bytes: int | None = None
    peak_memory_bytes: int | None = None
    # Its place in the queue: since when it waits, the ids it comes after, and what keeps it there.
    priority: int = 0
    held: bool = False
    after: tuple[int, ...] = ()
    queued: float | None = None
    waits_for: str | None = None
    # With `any_gpus` it takes whichever so many have the memory, else those of `gpu_uuids`.
    gpus_wanted: int = 0
    any_gpus: bool = False
    # CUDA_VISIBLE_DEVICES where it was launched, to which `any_gpus` is limited.
    visible_devices: str | None = None
    shares_gpus: bool = False
    card_memory_bytes: int | None = None
    expected_s: float | None = None
    # Restarts after a crash: allowed, and made since a person last started it.
    max_restarts: int = 0
    restarts: int = 0
    backend: str = "local"
    tags: tuple[str, ...] = ()
    note: str = ""

    @property
    def supervisor(self) -> ProcessRef | None:
        if self.supervisor_pid is None or self.supervisor_start is None or self.boot_id is None:
            return None
        return ProcessRef(self.supervisor_pid, self.supervisor_start, self.boot_id)

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step at the speed of the latest ones; None where that is not known yet."""
        if not (self.total_steps and self.step and self.tokens_per_s):
            return None
        return max(0, self.total_steps - self.step) * (self.tokens / self.step) / self.tokens_per_s


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `ranks`: one training process and how it ended."""

    job_id: int
    attempt: int
    rank: int
    pid: int
    start_ticks: int
    boot_id: str
    exit_code: int | None = None
    exit_signal: int | None = None
    ended: float | None = None
    error: str | None = None

    @property
    def process(self) -> ProcessRef:
        return ProcessRef(self.pid, self.start_ticks, self.boot_id)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `leases`: who holds which GPU since when; of a shared one, and how much of its memory."""

    host: str
    gpu_uuid: str
    gpu_index: int
    job_id: int
    user: str
    pid: int
    since: float
    shared: bool = False
    memory_bytes: int | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to a job; level is "info", "warning" or "error"."""

    timestamp: float
    level: str
    kind: str
    message: str


def to_row(job: Job) -> dict[str, Any]:
    """The job as `jobs` stores it."""
    return as_columns(msgspec.structs.asdict(job))


def to_job(row: dict[str, Any]) -> Job:
    """The job of a row of `jobs`."""
    # A store of an older version, opened to read, has not all columns.
    lists = {name: msgspec.json.decode(row[name]) for name in _LIST_COLUMNS if name in row}
    flags = {name: bool(row[name]) for name in _FLAG_COLUMNS if name in row}
    return msgspec.convert(row | lists | flags, Job)


def as_columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a job as the columns of `jobs` hold them."""
    return {name: _list_to_text(value) if name in _LIST_COLUMNS else value for name, value in fields.items()}


def _list_to_text(values: Iterable[Any]) -> str:
    return msgspec.json.encode(list(values)).decode()

"""The rows in `control.db`: jobs, ranks, GPU leases and events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from trainer.contract.json_file import convert_as, decode_as
from trainer.contract.process import Pid, ProcessRef
from trainer.contract.store.states import JobState

_LIST_COLUMNS = ("gpu_ids", "gpu_uuids", "after", "tags")  # columns that contain a JSON list
_FLAG_COLUMNS = ("distributed", "held", "any_gpus", "shares_gpus")
_OTHERWISE_STORED = (*_LIST_COLUMNS, *_FLAG_COLUMNS)
_FLAGS = {0: False, 1: True}
# The series with the step at which an SAE of a sweep was dropped; see `train.halving`.
DROPPED = "dropped_at_step"
# Columns with a run's latest metrics; all other metrics are only in the run's own store.
VALUE_COLUMNS = ("loss", "fvu", "l0", "dead_fraction", "tokens_per_s", "heldout_fvu", "heldout_l0")
R = TypeVar("R")

# Bounds for the values in a row. Some code, such as date functions, would fail for larger values.
LARGEST_ID = 999_999_999
JobId = Annotated[int, Meta(ge=0, le=LARGEST_ID)]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
WorldSize = Annotated[int, Meta(ge=1, le=100_000)]
Number = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
FewAtOnce = Annotated[int, Meta(ge=0, le=100_000)]
Time = Annotated[float, Meta(ge=0, le=250_000_000_000)]  # up to the year 9892
LONGEST_S = 1e12
Duration = Annotated[float, Meta(ge=0, le=LONGEST_S)]
Device = Literal["cuda", "cpu"]
# Only the format of registry names is checked, because another version may have other entries, which are only
# displayed.
Name = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,39}\Z")]
GpuSourceName = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_-]{0,39}(:[1-9][0-9]{0,3})?\Z")]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `jobs`. Times are seconds since the epoch."""

    id: JobId = 0
    name: str
    state: JobState = JobState.QUEUED
    config: str
    user: str
    host: str
    device: Device
    gpu_source: GpuSourceName
    gpu_ids: tuple[FewAtOnce, ...] = ()
    gpu_uuids: tuple[str, ...] = ()
    distributed: bool = False
    world_size: WorldSize = 1
    mode: Name = "single"
    boot_id: str | None = None
    supervisor_pid: Pid | None = None
    supervisor_start: Count | None = None
    attempt: Count = 0
    parent: JobId | None = None
    created: Time = 0.0
    started: Time | None = None
    ended: Time | None = None
    step: Count = 0
    total_steps: Count | None = None
    tokens: Count = 0
    loss: float | None = None
    fvu: float | None = None
    l0: float | None = None
    dead_fraction: float | None = None
    tokens_per_s: Annotated[float, Meta(ge=0, le=LONGEST_S)] | None = None
    error: str | None = None
    output_path: str | None = None
    d_in: Count | None = None
    d_out: Count | None = None
    # Memory per rank. The peak is the memory that PyTorch reserved on the fullest GPU, or the memory of the largest CPU
    # process.
    estimated_memory_bytes: Count | None = None
    peak_memory_bytes: Count | None = None
    # Fields for the queue, including the ids of the jobs on which this job depends (`after`), the time when it was
    # queued, and the reason why it is waiting.
    priority: Number = 0
    held: bool = False
    after: tuple[JobId, ...] = ()
    queued: Time | None = None
    waits_for: str | None = None
    # With `any_gpus`, the job gets any `gpus_wanted` GPUs with enough memory; otherwise, it gets the GPUs in
    # `gpu_uuids`.
    gpus_wanted: FewAtOnce = 0
    any_gpus: bool = False
    # The value of CUDA_VISIBLE_DEVICES at launch; with `any_gpus`, this limits the choice of GPUs.
    visible_devices: str | None = None
    shares_gpus: bool = False
    card_memory_bytes: Count | None = None
    expected_s: Duration | None = None
    # The maximum number of restarts after a crash, and the number of restarts since a user last started the job.
    max_restarts: Count = 0
    restarts: Count = 0
    backend: Name = "local"
    # The energy used by the GPUs, and the GPU-seconds held, measured, and read from an energy counter.
    energy_wh: Duration | None = None
    energy_s: Duration | None = None
    energy_known_s: Duration | None = None
    energy_counted_s: Duration | None = None
    # Metrics on held-out rows; `fvu` and `l0` are from the last batches.
    heldout_fvu: float | None = None
    heldout_l0: float | None = None
    # A warning about overfitting: the held-out FVU is clearly higher than the FVU on training rows, or than it was
    # earlier in the run.
    overfitting: str | None = None
    tags: tuple[str, ...] = ()
    note: str = ""
    # For a job launched as part of an array: the id of the array's first job, and how many of its jobs may run at once,
    # if limited.
    array: JobId | None = None
    array_limit: Count | None = None
    # The job's machine id, stored because the host name may change; "" or None if unknown.
    machine_id: str | None = None

    @property
    def queue_limit(self) -> int | None:
        """How many jobs of its array this machine's queue may start; a cluster's scheduler limits its own arrays."""
        return self.array_limit if self.backend == "local" else None

    @property
    def takes_slices(self) -> bool:
        """Whether the job can use MIG slices as GPUs.

        A training job on several GPUs cannot use slices because its ranks exchange tensors. Extraction processes can
        use slices.
        """
        return self.gpus_wanted == 1 or self.mode == "single"

    @property
    def supervisor(self) -> ProcessRef | None:
        if self.supervisor_pid is None or self.supervisor_start is None or self.boot_id is None:
            return None
        return ProcessRef(self.supervisor_pid, self.supervisor_start, self.boot_id)

    @property
    def left_s(self) -> float | None:
        """The number of seconds until the last step at the current speed, or None if unknown."""
        if not (self.total_steps and self.step and self.tokens_per_s):
            return None
        left_s = max(0, self.total_steps - self.step) * (self.tokens / self.step) / self.tokens_per_s
        return left_s if left_s < LONGEST_S else None


_TYPES = {field.name: field.type for field in msgspec.structs.fields(Job)}


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """A row in `ranks`: a rank's process and its exit status."""

    job_id: JobId
    attempt: Count
    rank: FewAtOnce
    pid: Pid
    start_ticks: Count
    boot_id: str
    exit_code: Number | None = None
    exit_signal: Number | None = None
    ended: Time | None = None
    error: str | None = None

    @property
    def process(self) -> ProcessRef:
        return ProcessRef(self.pid, self.start_ticks, self.boot_id)


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """A row in `leases`: the job and user holding a GPU, the start time, and the memory leased on a shared GPU."""

    host: str
    gpu_uuid: str
    gpu_index: FewAtOnce
    job_id: JobId
    user: str
    pid: Pid
    since: Time
    shared: bool = False
    memory_bytes: Count | None = None


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """The columns of `jobs` that say how many GPUs a job has held since it was last queued, and for how long."""

    id: JobId
    user: str
    state: JobState
    priority: Number = 0
    queued: Time | None = None
    started: Time
    ended: Time | None = None
    n_gpus: FewAtOnce = 0
    energy_s: Duration | None = None


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """An event for a job; the level is "info", "warning" or "error"."""

    timestamp: Time
    level: str
    kind: str
    message: str


def to_row(job: Job) -> dict[str, Any]:
    """Return the job as a row for `jobs`."""
    return as_columns(msgspec.structs.asdict(job))


def to_job(row: dict[str, Any]) -> Job:
    """Return the job in a row from `jobs`; raise `ValueError` if a column has a value this program never writes."""
    # Some columns are missing if a store from an older version is opened read-only.
    return convert(row | {name: _column(name, row[name]) for name in _OTHERWISE_STORED if name in row}, Job)


def convert(value: Any, kind: type[R]) -> R:
    """Convert a row or a column to a type; raise `ValueError` for a value that this program never writes."""
    try:
        return convert_as(value, kind)
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


def readable(rows: Iterable[Any], kind: type[R]) -> Iterator[R]:
    """Convert rows to a type, skipping rows with values that this program never writes."""
    for row in rows:
        with contextlib.suppress(ValueError):
            yield convert(row, kind)


def salvage(row: dict[str, Any], fallback: Job) -> Job:
    """Return a job with the readable columns of a corrupt row, and all other fields from `fallback`."""
    fields = {}
    for name, kind in _TYPES.items():
        with contextlib.suppress(ValueError, KeyError):
            fields[name] = convert(_column(name, row[name]), kind)
    return msgspec.structs.replace(fallback, **fields)


def fitting(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the job fields whose values are valid in a row."""
    valid = {}
    for name, value in fields.items():
        with contextlib.suppress(ValueError):
            valid[name] = convert(value, _TYPES[name])
    return valid


def _column(name: str, value: Any) -> Any:
    """Convert a column's value to the field's value: JSON to a list, and 0 and 1 to a bool."""
    if name in _LIST_COLUMNS and isinstance(value, str):
        return decode_as(value, list[Any])
    return _FLAGS.get(value, value) if name in _FLAG_COLUMNS else value


def as_columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a job's fields to column values for `jobs`."""
    return {name: _list_to_text(value) if name in _LIST_COLUMNS else value for name, value in fields.items()}


def _list_to_text(values: Iterable[Any]) -> str:
    return msgspec.json.encode(list(values)).decode()

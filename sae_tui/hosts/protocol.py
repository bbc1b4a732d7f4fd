"""The messages written by `sae-tui stream` on another host, one JSON object per line.

Readers must not trust the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta

from sae_tui.gpu.base import Condition, Degrees, GpuSample, Measured, columns
from sae_tui.gpu.sensors import sensors_of
from sae_tui.jobs.view.reader import JobView
from trainer.contract.json_file import LARGEST, decode_as
from trainer.contract.printable import printable, printable_json
from trainer.contract.process import Pid
from trainer.contract.store.job_store import RequestKind
from trainer.contract.store.metrics_store import Heartbeat
from trainer.contract.store.rows import Count, Duration, Event, FewAtOnce, Job, JobId, Number, Rank, Time, WorldSize
from trainer.contract.store.seeds import Seeds, Spread
from trainer.contract.store.states import JobState

PROTOCOL = 1
LONGEST_LINE = 1 << 20  # bytes
LONGEST_TEXT, LONGEST_LOG_LINE = 300, 1000  # characters
MOST_PROCESSES = 8  # per GPU
_NOT_OF_SAMPLES = ("holder", "use", "processes", "sensors")
MOST_SENSORS = 50  # per GPU
MOST_GPUS, MOST_JOBS, MOST_LOG_LINES = 64, 300, 200  # maximum per message, so that a message fits in one line
_MOST_ITEMS = {"after": 100, "tags": 20, "gpu_ids": MOST_GPUS, "gpu_uuids": MOST_GPUS}  # in a job's lists
# Limits for the details of one job: events and ranks per message, curve points per message, file bytes per message, the
# size of a file (see `largest_file`), and the number of curves. A sweep of 64 SAEs has 2000 curves.
MOST_EVENTS, MOST_RANKS, MOST_SENT_POINTS, PART_BYTES = 100, 500, 5000, 256 << 10
_LARGEST_FILE, LARGEST_FEATURES = 8 << 20, 512 << 20
MOST_CURVES, MOST_SAES, MOST_GONE = 5000, 200, 2000
MOST_SEEDS, MOST_SPREADS = 100, 50  # per job

# A job's files that can be read from another host. A label is a folder name, which has at most 255 bytes. Unlike `$`,
# `\Z` does not match before a trailing line break.
_LABEL = r"[A-Za-z0-9][A-Za-z0-9_.,=+-]{0,254}"
LABEL = rf"^({_LABEL})?\Z"
PATH = (
    r"^(run/(job\.toml|exit\.json|attempt[0-9]{1,6}/(plan|data|rank[0-9]{1,6}\.exit)\.json"
    r"|logs/(rank[0-9]{1,6}|supervisor|evaluation)\.log)"
    rf"|sae/({_LABEL}/)?(card\.json|card_sums\.json|cfg\.json|features\.safetensors|(notes|explanations)\.jsonl))\Z"
)

Use = Literal["dim", "good", "warn"]
# Older versions do not know the plain style for a GPU in use, so "warn" is sent instead.
_SENT = {"text": "warn"}
Reading = Annotated[float, Meta(ge=-1e15, le=1e15)]
Share = Annotated[int, Meta(ge=0, le=100)]
Speed = Annotated[float, Meta(ge=0, le=1e12)]
S = TypeVar("S", bound=msgspec.Struct)
J = TypeVar("J", bound=Job)


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first line: the protocol version and the program version."""

    protocol: FewAtOnce
    version: str


class FarProcess(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process on a GPU, with the same fields as `GpuProcess`."""

    pid: Pid
    user: str | None = None
    name: str | None = None
    memory_used_bytes: Count | None = None


class RemoteGpu(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU's latest sample, a description of its holder, and the processes that use the most memory on it."""

    index: FewAtOnce
    uuid: str
    name: str
    utilization: Share | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    temperature_c: Degrees | None = None
    power_w: Measured | None = None
    power_limit_w: Measured | None = None
    healthy: bool = True
    reason: str = ""
    holder: str = ""
    use: Use = "dim"
    # Maps the other sensor fields in a GPU list to their values. A reader ignores sensors it does not know.
    sensors: Annotated[dict[str, Reading], Meta(max_length=MOST_SENSORS)] = {}
    processes: Annotated[tuple[FarProcess, ...], Meta(max_length=MOST_PROCESSES)] = ()

    def sample(self, timestamp: float) -> GpuSample:
        """Return the GPU as a sample; `timestamp` is from this machine's clock."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in _NOT_OF_SAMPLES}
        fields |= self._sensors_of(GpuSample)
        condition = Condition(**self._sensors_of(Condition)) if self.sensors else None
        return GpuSample(timestamp=timestamp, condition=condition, **fields)

    def _sensors_of(self, kind: type) -> dict[str, Any]:
        return {name: value for name, value in self.sensors.items() if name in OTHERS and name in sensors_of(kind)}


class RemoteGpus(msgspec.Struct, frozen=True, tag="gpus"):
    """All GPUs on a host; `problem` explains why there are none."""

    # The name on the wire is `cards`, as in earlier versions.
    gpus: Annotated[tuple[RemoteGpu, ...], Meta(max_length=MOST_GPUS)] = msgspec.field(default=(), name="cards")
    problem: str = ""


class FarSpread(msgspec.Struct, frozen=True):
    """The mean of a metric over `n` seeds and its standard deviation, as in `Spread`."""

    mean: float
    sd: Annotated[float, Meta(ge=0)]
    n: FewAtOnce


class FarSeeds(msgspec.Struct, frozen=True):
    """The SAEs that differ only in the seed, with the spreads of the metrics in `FarJob`, as in `Seeds`."""

    labels: Annotated[tuple[str, ...], Meta(min_length=1, max_length=MOST_SEEDS)]
    are_all: bool
    spreads: Annotated[dict[str, FarSpread], Meta(max_length=MOST_SPREADS)]

    def view(self) -> Seeds:
        known = {name: one for name, one in self.spreads.items() if name in _FAR_FIELDS}
        spreads = {name: Spread(one.mean, one.sd, one.n) for name, one in known.items()}
        return Seeds(self.labels, self.are_all, spreads)


class FarJob(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The job fields shown in the jobs list, with the same names as in `JobView`."""

    id: JobId
    name: str
    state: JobState
    user: str = ""
    gpu_ids: Annotated[tuple[FewAtOnce, ...], Meta(max_length=MOST_GPUS)] = ()
    world_size: WorldSize = 1
    attempt: Count = 0
    step: Count = 0
    total_steps: Count | None = None
    tokens: Count = 0
    loss: float | None = None
    fvu: float | None = None
    l0: float | None = None
    heldout_fvu: float | None = None
    heldout_l0: float | None = None
    dead_fraction: float | None = None
    k: str = ""
    d_sae: str = ""
    tokens_per_s: Speed | None = None
    progress: Annotated[float, Meta(ge=0, le=1)] = 0.0
    phase: str = ""
    eta_s: Duration | None = None
    created: Time = 0.0
    queued: Time | None = None
    priority: Number = 0
    held: bool = False
    after: Annotated[tuple[JobId, ...], Meta(max_length=_MOST_ITEMS["after"])] = ()
    any_gpus: bool = False
    gpus_wanted: FewAtOnce = 0
    waits_for: str | None = None
    silent: str = ""
    stop_requested: bool = False
    error: str | None = None
    tags: Annotated[tuple[str, ...], Meta(max_length=_MOST_ITEMS["tags"])] = ()
    note: str = ""
    # This is a separate field because older versions do not know the state `imported`.
    imported: bool = False
    # Older versions send no seeds, and ignore this field.
    seeds: FarSeeds | None = None

    def view(self, host: str) -> JobView:
        """Return this record as the view of a job on `host`; fields that were not sent are empty."""
        device: Literal["cuda", "cpu"] = "cuda" if self.gpu_ids else "cpu"
        fields = msgspec.structs.asdict(self)
        if fields.pop("imported"):
            fields["state"] = JobState.IMPORTED
        fields["seeds"] = self.seeds.view() if self.seeds else None
        return JobView(config="", host=host, device=device, gpu_source="auto", **fields)


class Jobs(msgspec.Struct, frozen=True, tag="jobs"):
    """The latest jobs on a host; `more` is the number of older jobs, and `problem` explains why jobs cannot be read."""

    jobs: Annotated[tuple[FarJob, ...], Meta(max_length=MOST_JOBS)] = ()
    more: Count = 0
    problem: str = ""


class Log(msgspec.Struct, frozen=True, tag="log"):
    """The next lines from the requested log, and the line being written, which is null if it has not changed."""

    lines: Annotated[tuple[str, ...], Meta(max_length=MOST_LOG_LINES)] = ()
    unfinished: str | None = None


class JobRow(msgspec.Struct, frozen=True, tag="job", omit_defaults=True):
    """A job's row in the store, with its ranks, its open requests, and its events from index `first` on."""

    job: Job
    ranks: Annotated[tuple[Rank, ...], Meta(max_length=MOST_RANKS)] = ()
    requests: Annotated[tuple[RequestKind, ...], Meta(max_length=len(get_args(RequestKind)))] = ()
    first: Count = 0
    events: Annotated[tuple[Event, ...], Meta(max_length=MOST_EVENTS)] = ()


class CurvePart(msgspec.Struct, frozen=True):
    """The next points of a curve; `times` are in seconds since the epoch."""

    name: Annotated[str, Meta(max_length=LONGEST_TEXT)]
    rank: FewAtOnce
    steps: tuple[Count, ...]
    times: tuple[Time | None, ...]
    values: tuple[float | None, ...]


class Curves(msgspec.Struct, frozen=True, tag="curves"):
    """The next points of several curves."""

    parts: Annotated[tuple[CurvePart, ...], Meta(max_length=MOST_SENT_POINTS)]


class RunState(msgspec.Struct, frozen=True, tag="run", omit_defaults=True):
    """A run's heartbeat, and the events written by the run, from index `first` on.

    If `rewound`, the run has gone back to an earlier step: all points sent so far are invalid, and all curves follow.
    """

    heartbeat: Heartbeat | None = None
    first: Count = 0
    events: Annotated[tuple[Event, ...], Meta(max_length=MOST_EVENTS)] = ()
    rewound: bool = False


class FilePart(msgspec.Struct, frozen=True, tag="file", omit_defaults=True):
    """The next bytes of a file, whose path starts with `run` or `sae`.

    The file has `total` bytes. A log has no `total`: a part at offset 0 replaces it, and any other part is appended.
    """

    path: Annotated[str, Meta(pattern=PATH)]
    data: Annotated[bytes, Meta(max_length=PART_BYTES)]
    offset: Count = 0
    total: Annotated[int, Meta(ge=0, le=LARGEST_FEATURES)] | None = None


class Stamp(msgspec.Struct, frozen=True):
    """A feature file, which is sent only on request: its size in bytes, and a number that changes with its content."""

    bytes: Count
    number: Count


class UpToDate(msgspec.Struct, frozen=True, tag="up to date", omit_defaults=True):
    """All data has been sent.

    `features` maps the label of each SAE with a feature file to the file's stamp. `gone` lists the files that were sent
    over this connection but no longer exist.
    """

    features: Annotated[dict[Annotated[str, Meta(pattern=LABEL)], Stamp], Meta(max_length=MOST_SAES)] = {}
    gone: Annotated[tuple[Annotated[str, Meta(pattern=PATH)], ...], Meta(max_length=MOST_GONE)] = ()


Message = Hello | RemoteGpus | Jobs | Log | JobRow | Curves | RunState | FilePart | UpToDate
# The messages about one job, whose text is stored unchanged; the screens filter what they show.
_STORED = (JobRow, Curves, RunState, FilePart, UpToDate)


_FAR_FIELDS = frozenset(FarJob.__struct_fields__)
# The sensors in a GPU list that are not `RemoteGpu` fields.
OTHERS = frozenset(one.name for one in columns()) - frozenset(RemoteGpu.__struct_fields__)


def largest_file(path: str) -> int:
    """Return the maximum size in bytes of a job's file that is sent with its changes.

    Files of lines, such as explanations, grow with the number of latents, and may be as large as on their own host.
    """
    return LARGEST if path.endswith(".jsonl") else _LARGEST_FILE


def remote_gpu(sample: GpuSample, holder: str, use: str) -> RemoteGpu:
    """Convert a sample to the protocol's GPU record."""
    fields = {name: getattr(sample, name) for name in RemoteGpu.__struct_fields__ if name not in _NOT_OF_SAMPLES}
    busy = sample.utilization
    largest = sorted(sample.processes or (), key=lambda one: -(one.memory_used_bytes or 0))[:MOST_PROCESSES]
    processes = tuple(FarProcess(one.pid, one.user, one.name, one.memory_used_bytes) for one in largest)
    sensors = {name: value for name in sorted(OTHERS) if (value := sample.value(name)) is not None}
    fields |= {"utilization": busy and min(100, busy), "sensors": sensors}
    return RemoteGpu(**fields, holder=holder, use=_SENT.get(use, use), processes=processes)  # type: ignore[arg-type]


def far_job(job: JobView) -> FarJob:
    """Convert a job to the protocol's job record."""
    short = short_lists(job)
    fields = {name: getattr(short, name) for name in FarJob.__struct_fields__ if name != "imported"}
    if job.state is JobState.IMPORTED:
        fields |= {"state": JobState.FINISHED, "imported": True}
    fields["seeds"] = _far_seeds(job.seeds) if job.seeds else None
    fields["progress"] = min(1.0, max(0.0, job.progress))
    return _clean(FarJob(**fields), LONGEST_TEXT)


def _far_seeds(seeds: Seeds) -> FarSeeds:
    known = {name: FarSpread(one.mean, one.sd, one.n) for name, one in seeds.spreads.items() if name in _FAR_FIELDS}
    return FarSeeds(seeds.labels[:MOST_SEEDS], seeds.are_all, known)


def short_lists(job: J) -> J:
    """Return a job with only the first entries of each of its lists."""
    return msgspec.structs.replace(job, **{name: getattr(job, name)[:most] for name, most in _MOST_ITEMS.items()})


def jobs_message(jobs: Sequence[JobView], problem: str) -> Jobs:
    """Return a message with as many jobs as fit, in the given order; unfinished jobs take precedence."""
    first = [job.id for job in jobs if not job.state.is_final] + [job.id for job in jobs if job.state.is_final]
    count = MOST_JOBS
    while True:
        chosen = set(first[:count])
        sent = [far_job(job) for job in jobs if job.id in chosen]
        if len(msgspec.json.encode(sent)) < LONGEST_LINE // 2:
            return Jobs(tuple(sent), len(jobs) - len(sent), printable(problem[:LONGEST_TEXT]))
        count //= 2


def log_messages(lines: Sequence[str], unfinished: str | None = None) -> Iterator[Log]:
    """Split log lines into messages; a final message contains the unfinished line, if it has changed."""
    for start in range(0, len(lines), MOST_LOG_LINES):
        yield _clean(Log(tuple(lines[start : start + MOST_LOG_LINES])), LONGEST_LOG_LINE)
    if unfinished is not None:
        yield _clean(Log(unfinished=unfinished), LONGEST_LOG_LINE)


def decode(line: bytes) -> Message:
    """Decode a line into a message with printable, truncated text; raise `ValueError` if it is invalid."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"a line is longer than {LONGEST_LINE >> 20} MiB")
    message: Message = decode_as(line, Message)  # type: ignore[arg-type]
    if isinstance(message, _STORED):
        return message
    return _clean(message, LONGEST_LOG_LINE if isinstance(message, Log) else LONGEST_TEXT)


def fitted(message: S, most_bytes: int = LONGEST_LINE) -> S:
    """Return the message with its longest texts truncated with "…", so that its line has at most `most_bytes`."""
    longest = most_bytes
    while line_size(message) > most_bytes:
        longest //= 2
        message = _changed(message, partial(_cut, longest))
    return message


def line_size(value: object) -> int:
    """Return how many bytes a value takes up in a line."""
    return len(printable_json(msgspec.json.encode(value).decode()).encode())


def _cut(longest: int, text: str) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _clean(of: S, longest: int) -> S:
    """Make all text in a message printable, and truncate each string to `longest` characters."""
    return _changed(of, lambda text: printable(text[:longest]).replace("\t", " "))


def _changed(of: S, change: Callable[[str], str]) -> S:
    """Return a message with `change` applied to all its text."""
    changed = {}
    for name in of.__struct_fields__:
        before = getattr(of, name)
        after = _changed_value(before, change)
        if after is not before:
            changed[name] = after
    return msgspec.structs.replace(of, **changed) if changed else of


def _changed_value(value: object, change: Callable[[str], str]) -> object:
    if isinstance(value, JobState):
        return value
    if isinstance(value, str):
        return change(value)
    if isinstance(value, msgspec.Struct):
        return _changed(value, change)
    if isinstance(value, tuple) and value:
        return tuple(_changed_value(one, change) for one in value)
    return value

"""The interface for GPU sources, and the immutable samples they return.

In a sample, `None` means "sensor not supported".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from sae_tui.gpu.sensors import (
    BYTES,
    COUNT,
    DEGREES,
    IMPOSSIBLE,
    JOULES,
    MHZ,
    PERCENT,
    WATTS,
    Sensor,
    drop_impossible,
    exported,
    is_possible,
    sensors_of,
)
from trainer.contract.json_file import decode_as
from trainer.contract.process import Pid
from trainer.contract.store.rows import Count, FewAtOnce, Time

# If more memory than this is in use without belonging to a listed process, an unlisted process must be using the GPU. A
# desktop uses less, and older drivers report only 0.3 to 0.9 GB as used on an idle GPU.
UNSEEN_BYTES = 1 << 30
# The minimum GPU memory of a compute process, which is the size of a CUDA context.
CONTEXT_BYTES = 100 << 20
LATCHED_PERCENT = 100
# A desktop occasionally raises utilisation, but only up to this percentage.
IDLE_PERCENT = 5
# Limits for values from files that other users may have written; the limits keep sums and tables valid.
Measured = Annotated[float, Meta(ge=0, le=1e9)]
Degrees = Annotated[int, Meta(ge=-1000, le=100_000)]


# Opening the driver initialises every GPU, which takes seconds if no GPU is in use and persistence mode is off.
OPEN_LIMIT_S = 15.0
GPU_LIMIT_S = 5.0
# Reasons for involuntary throttling: heat, or a weak power supply.
THROTTLING = (
    "hardware limit (heat or power)",
    "too hot (driver limit)",
    "too hot (hardware limit)",
    "power supply limit (power brake)",
)


# The kinds of processes on a GPU: compute, graphics, or both.
ProcessKind = Literal["C", "G", "C+G"]


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process holding memory on a GPU; `ancestors` contains the pids of its parent, its grandparent and so on.

    `kind` is None if the driver does not distinguish compute and graphics processes.
    """

    pid: Pid
    user: str | None
    name: str | None
    memory_used_bytes: Count | None
    ancestors: tuple[Pid, ...] = ()
    kind: ProcessKind | None = None

    def __post_init__(self) -> None:
        if not is_possible(self.memory_used_bytes, BYTES):
            object.__setattr__(self, "memory_used_bytes", None)


class ProcessShares(NamedTuple):
    """The shares of a GPU's units that a process uses, in percent: multiprocessors, memory bandwidth and video units.

    None means "unknown".
    """

    sm: int | None = None
    memory_bandwidth: int | None = None
    encoder: int | None = None
    decoder: int | None = None


# Compute modes that allow no compute process, or only one at a time.
NO_COMPUTING = "no computing"
ONE_PROCESS = "one process"


@dataclass(frozen=True, slots=True)
class Xid:
    """An error reported by the driver for a GPU. After a fatal error, the GPU is unusable until it is reset."""

    number: int
    timestamp: float
    words: str
    is_fatal: bool = False


@dataclass(frozen=True, slots=True)
class Condition:
    """A GPU's clocks, throttling reasons and health, read together with its processes.

    `ecc_uncorrected` counts memory errors since the last reset. `rows_pending` is True if memory rows await
    replacement, and `rows_failed` is True if a row could not be replaced. The GPU throttles at `slowdown_c`. `xid` is
    the latest fatal error since the program started listening, or the latest error if none was fatal. `recovery` is the
    action that the driver requires before the GPU is used again, such as `a reset`, or "" if it requires none.
    `recovery` also reflects earlier errors. Impossible values become None.
    """

    sm_clock_mhz: Annotated[int | None, Sensor("Core clock", MHZ)] = None
    performance_state: Annotated[int | None, Sensor("Performance state, from 0 (full speed) to 15", (0, 15))] = None
    fan_percent: Annotated[int | None, Sensor("Fan speed", PERCENT, title="fan")] = None
    slowed_by: Annotated[tuple[str, ...] | None, Sensor("Throttling reasons, as a list of phrases")] = None
    slowdown_c: Annotated[int | None, Sensor("Temperature at which it throttles", (30, 200))] = None
    xid: Annotated[Xid | None, Sensor("The last error that the driver reported", null="none")] = None
    compute_mode: Annotated[str | None, Sensor("Compute mode: shared, one process, or no computing")] = None
    ecc_uncorrected: Annotated[int | None, Sensor("Uncorrected memory errors since the last reset", COUNT)] = None
    rows_pending: Annotated[bool | None, Sensor("Whether a reset is needed to remap memory rows")] = None
    rows_failed: Annotated[bool | None, Sensor("Whether a memory row could not be remapped")] = None
    recovery: Annotated[
        str | None, Sensor('Recovery action that the driver requires before the next use, or "" if none')
    ] = None

    def __post_init__(self) -> None:
        drop_impossible(self)

    @property
    def trouble(self) -> tuple[str, str]:
        """The most serious reason not to run jobs on the GPU, as a long and a short text, or ("", "")."""
        n_errors = self.ecc_uncorrected
        if self.compute_mode == NO_COMPUTING:
            return "its compute mode forbids all programs (nvidia-smi -c DEFAULT allows them)", "compute mode: none"
        if self.rows_failed:
            return "the GPU is failing: a row of its memory could not be replaced", "failing: memory rows"
        if self.xid and self.xid.is_fatal:
            remedy = "" if "reset" in self.xid.words else "; it needs a reset"
            return f"the GPU is failing, {self.xid.words}{remedy}", f"failing: Xid {self.xid.number}"
        if self.recovery:
            return f"the driver reports that the GPU needs {self.recovery}", f"needs {self.recovery}"
        if self.rows_pending:
            return "the GPU needs a reset: rows of its memory are waiting to be replaced", "needs a reset"
        if n_errors:
            errors = f"{n_errors} uncorrected memory error{'s' * (n_errors != 1)} (ECC)"
            return f"the GPU is failing: {errors}; it needs a reset", f"failing: {n_errors} ECC errors"
        return "", ""

    @property
    def throttled_by(self) -> tuple[str, ...] | None:
        """The reasons for involuntary throttling, excluding limits set by a user, or None if unknown."""
        return None if self.slowed_by is None else tuple(words for words in self.slowed_by if words in THROTTLING)


@dataclass(frozen=True, slots=True)
class GpuSample:
    """A GPU reading; `timestamp` is in seconds since the epoch.

    `healthy` is False for a GPU that cannot be read, and `reason` then explains why. `unusable` explains why jobs
    cannot run on a readable GPU. If a sensor fails or returns an impossible value, the sensor's field is None, and
    `failed` maps the field to the reason. Sensors not present on the GPU are not in `failed`.
    """

    index: FewAtOnce
    uuid: str
    name: str
    timestamp: Time
    _: KW_ONLY
    memory_total_bytes: Annotated[Count | None, Sensor("Memory capacity", (1, BYTES[1]), public="memory_total")] = None
    memory_used_bytes: Annotated[Count | None, Sensor("Memory in use", BYTES, public="memory_used")] = None
    # Excludes memory reserved by the driver. If the free memory is not reported, it is total minus used memory.
    memory_free_bytes: Annotated[Count | None, Sensor("Free memory", BYTES, public="memory_free")] = None
    utilization: Annotated[Count | None, Sensor("Share of time during which a kernel ran", PERCENT)] = None
    temperature_c: Annotated[
        Degrees | None, Sensor("Temperature of the chip", DEGREES, public="temperature", heading="TEMP", drop=0)
    ] = None
    power_w: Annotated[
        Measured | None, Sensor("Power draw", WATTS, public="power_draw", heading="POWER", drop=1)
    ] = None  # fmt: skip
    power_limit_w: Annotated[Measured | None, Sensor("Power limit", (0.5, WATTS[1]), public="power_limit")] = None
    # The energy used since the driver was loaded; only some samples include it.
    energy_j: Annotated[float | None, Sensor(limits=JOULES)] = None
    processes: tuple[GpuProcess, ...] | None = None
    healthy: bool = True
    reason: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)
    unusable: str = ""
    condition: Condition | None = None
    # The vendor's name in `VENDORS`, if the source has GPUs from several vendors.
    vendor: str = ""
    # True if the GPU cannot be read because only other users may use it.
    withheld: bool = False
    # When the GPU became unreadable, if it was readable before.
    unread_since: Time | None = None
    # True if the GPU shares host memory with other programs and the page cache.
    is_memory_shared: bool = False

    def __post_init__(self) -> None:
        failed = drop_impossible(self)
        total = self.memory_total_bytes
        for name in ("memory_used_bytes", "memory_free_bytes"):
            n_bytes = getattr(self, name)
            if n_bytes is not None and total is not None and n_bytes > total:
                failed[name] = f"{IMPOSSIBLE} ({n_bytes} of {total} bytes)"
                object.__setattr__(self, name, None)
        if failed:
            object.__setattr__(self, "failed", {**failed, **self.failed})
        used = self.memory_used_bytes
        if self.memory_free_bytes is None and used is not None and total is not None:
            object.__setattr__(self, "memory_free_bytes", max(0, total - used))

    def value(self, name: str) -> Any:
        """Return the value of a sensor in the sample or its condition."""
        return getattr(self if name in sensors_of(GpuSample) else self.condition, name, None)

    @property
    def obstacle(self) -> str:
        """Why no job can run on a readable GPU, or "" if jobs can run."""
        return self.unusable or (self.condition.trouble[0] if self.condition else "")

    @property
    def is_latched(self) -> bool:
        """True if a GPU without processes reports full utilisation, as Blackwell GPUs do after a process is killed.

        The reported utilisation stays at 100 % until a process creates a CUDA context.
        """
        unexplained = self.unexplained_bytes
        is_free = self.processes == () and unexplained is not None and unexplained <= CONTEXT_BYTES
        return is_free and (self.utilization or 0) >= LATCHED_PERCENT

    @property
    def unexplained_bytes(self) -> int | None:
        """The used memory that belongs to no listed process, or None if unknown."""
        if self.is_memory_shared:
            return None
        listed = [process.memory_used_bytes for process in self.processes or ()]
        sizes = [n_bytes for n_bytes in listed if n_bytes is not None]
        if self.memory_used_bytes is None or len(sizes) < len(listed):
            return None
        return max(0, self.memory_used_bytes - sum(sizes))

    @property
    def is_used_unseen(self) -> bool:
        """True if unlisted processes are clearly using the GPU.

        High utilisation is not sufficient: it also occurs on an idle GPU that the driver has just initialised.
        """
        unexplained = self.unexplained_bytes
        if unexplained is not None and unexplained > UNSEEN_BYTES:
            return True
        computes = not self.processes and (self.utilization or 0) > IDLE_PERCENT
        return computes and (unexplained is None or unexplained > CONTEXT_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """Sums, means and maxima over several GPUs; a value is None if no GPU reports it.

    Used and total memory are summed over the same GPUs.
    """

    total_memory_used_bytes: Annotated[
        int | None, Sensor("Memory in use on all GPUs", public="total_memory_used")
    ] = None  # fmt: skip
    total_memory_total_bytes: Annotated[
        int | None, Sensor("Memory capacity of all GPUs", public="total_memory_total")
    ] = None
    average_utilization: Annotated[float | None, Sensor("Mean utilisation")] = None
    max_temperature_c: Annotated[float | None, Sensor("Highest temperature", public="max_temperature")] = None
    total_power_w: Annotated[float | None, Sensor("Power draw of all GPUs", public="total_power_draw")] = None


# Maps the field name of each sensor, in a sample or its condition, to the sensor's name in JSON output.
PUBLIC = {name: one.public for kind in (GpuSample, Condition) for name, one in exported(kind).items()}


def columns() -> tuple[Sensor, ...]:
    """Return the sensors shown as columns in a GPU list."""
    return tuple(one for kind in (GpuSample, Condition) for one in exported(kind).values() if one.heading)


def samples_of(output: Iterable[msgspec.Raw]) -> tuple[GpuSample, ...]:
    """Decode samples from a command's JSON output; skip samples that cannot be decoded."""
    samples = []
    for one in output:
        with contextlib.suppress(ValueError):
            samples.append(decode_as(bytes(one), GpuSample))
    return tuple(samples)


def is_identified(sample: GpuSample) -> bool:
    """Return whether a sample contains the GPU's real UUID rather than the placeholder used until the UUID is read."""
    return sample.failed.get("uuid") != "unknown"


@dataclass(frozen=True, slots=True)
class GpuPair:
    """The connection between a pair of GPUs.

    `path` is nvidia-smi's name for the path between the GPUs (PIX, PXB, PHB, NODE or SYS), or None if it is unknown.
    `peer_to_peer` is True if the GPUs can read each other's memory, and None if the driver does not report this.
    `obstacle` explains why the GPUs cannot read each other's memory.
    """

    first: int
    second: int
    path: str | None = None
    nvlink: bool = False
    peer_to_peer: bool | None = None
    obstacle: str = ""


class DriverFault(NamedTuple):
    """A fault in a driver that can still read its GPUs, and the remedy."""

    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts about the driver and its GPUs that do not change while the machine runs.

    `cuda` is the latest CUDA version supported by the driver. `capabilities` contains each GPU's compute capability,
    and `nvlinks` its active link count. `pairs` contains all pairs of readable GPUs.
    """

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    capabilities: tuple[tuple[int, int] | None, ...] = ()
    nvlinks: tuple[int, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    faults: tuple[DriverFault, ...] = ()


class SourceUnavailable(Exception):
    """Raised if no GPU can be read; `reason` is the cause, and `remedy` is advice for the user.

    `is_broken` is True if something must be repaired, and False if the machine has no GPUs.
    """

    def __init__(self, reason: str, remedy: str, *, is_broken: bool = False) -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy
        self.is_broken = is_broken


class GpuSource(Protocol):
    """A source of GPU readings. Every call may block forever, and each GPU is read only from its own thread."""

    name: str
    cuda: bool  # True if these GPUs are PyTorch's "cuda" devices; False if they are simulated by CPU processes.

    def open(self) -> int:
        """Connect and return the number of GPUs; raise `SourceUnavailable` on failure."""
        ...

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        """Read one GPU and, if `processes`, its processes.

        Never raise; return an unhealthy sample if the read fails.
        """
        ...

    def facts(self) -> GpuFacts:
        """Return the driver versions and the connections between GPUs; omit unknown facts."""
        ...

    def close(self) -> None: ...

"""The interface of a GPU source: immutable samples in which `None` means "this sensor is not supported"."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from sae_tui.gpu.limits import IMPOSSIBLE, drop_impossible, is_possible
from trainer.contract.json_file import decode_as
from trainer.contract.process import Pid
from trainer.contract.store.rows import Count, FewAtOnce, Time

# More than a desktop holds, or the 0.3 to 0.9 GB that older drivers count as used on an idle card.
UNSEEN_BYTES = 1 << 30
# The least that a process holds on a card on which it computes.
CONTEXT_BYTES = 100 << 20
LATCHED_PERCENT = 100
# Percent of utilisation that a desktop causes now and then.
IDLE_PERCENT = 5
# Limits of values read from a file that others may have written, so that sums and tables can be made of them.
Measured = Annotated[float, Meta(ge=0, le=1e9)]
Degrees = Annotated[int, Meta(ge=-1000, le=100_000)]


# Opening the driver wakes up every card, which takes seconds where none is in use and nothing keeps them awake.
OPEN_LIMIT_S = 15.0
CARD_LIMIT_S = 5.0
# What slows a card down that is in trouble: heat, or power that does not come.
THROTTLING = (
    "hardware limit (heat or power)",
    "too hot (driver limit)",
    "too hot (hardware limit)",
    "power supply limit (power brake)",
)


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: Pid
    user: str | None
    name: str | None
    memory_used_bytes: Count | None

    def __post_init__(self) -> None:
        if not is_possible("memory_used_bytes", self.memory_used_bytes):
            object.__setattr__(self, "memory_used_bytes", None)


# Compute modes that allow no compute process, or one at a time.
NO_COMPUTING = "no computing"
ONE_PROCESS = "one process"


@dataclass(frozen=True, slots=True)
class Xid:
    """An error that the driver reported for a GPU; after a fatal one the GPU is unusable until it is reset."""

    number: int
    timestamp: float
    words: str
    is_fatal: bool = False


@dataclass(frozen=True, slots=True)
class Condition:
    """The clocks of a GPU, what limits them, and whether it may be used; read together with its processes.

    `ecc_uncorrected` counts memory errors since the last reset. `rows_pending`: memory rows wait to be replaced.
    `rows_failed`: a row could not be replaced. The GPU slows itself down at `slowdown_c`. `xid` is the last error, or
    the last fatal one, since the program began to listen. `recovery` is what the driver asks for before the GPU is used
    again, as in `a reset`, also for errors before that; empty if nothing. Impossible values become None.
    """

    sm_clock_mhz: int | None = None
    performance_state: int | None = None
    fan_percent: int | None = None
    slowed_by: tuple[str, ...] | None = None
    slowdown_c: int | None = None
    xid: Xid | None = None
    compute_mode: str | None = None
    ecc_uncorrected: int | None = None
    rows_pending: bool | None = None
    rows_failed: bool | None = None
    recovery: str | None = None

    def __post_init__(self) -> None:
        drop_impossible(self)

    @property
    def trouble(self) -> tuple[str, str]:
        """Why no job should run on the GPU, the worst reason first, and the same in a few words; both empty if none."""
        n_errors = self.ecc_uncorrected
        if self.compute_mode == NO_COMPUTING:
            return "its compute mode forbids all programs (nvidia-smi -c DEFAULT allows them)", "compute mode: none"
        if self.rows_failed:
            return "the GPU is failing: a row of its memory could not be replaced", "failing: memory rows"
        if self.xid and self.xid.is_fatal:
            remedy = "" if "reset" in self.xid.words else "; it needs a reset"
            return f"the GPU is failing, {self.xid.words}{remedy}", f"failing: Xid {self.xid.number}"
        if self.recovery:
            return f"the GPU needs {self.recovery}, as its driver says", f"needs {self.recovery}"
        if self.rows_pending:
            return "the GPU needs a reset: rows of its memory wait to be replaced", "needs a reset"
        if n_errors:
            errors = f"{n_errors} uncorrected memory error{'s' * (n_errors != 1)} (ECC)"
            return f"the GPU is failing: {errors}; it needs a reset", f"failing: {n_errors} ECC errors"
        return "", ""

    @property
    def throttled_by(self) -> tuple[str, ...] | None:
        """What slows the card down against everybody's will, as against a limit that was set; None if unknown."""
        return None if self.slowed_by is None else tuple(words for words in self.slowed_by if words in THROTTLING)


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of one GPU. `timestamp` is seconds since the epoch.

    `healthy` is False for a card that cannot be read; `reason` says why in one clause. `unusable` says why jobs
    cannot run on a GPU that can be read. `failed` names the fields whose sensor raised an error or returned an
    impossible value (which becomes None), not those whose sensor the GPU lacks.
    """

    index: FewAtOnce
    uuid: str
    name: str
    timestamp: Time
    utilization: Count | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    temperature_c: Degrees | None = None
    power_w: Measured | None = None
    power_limit_w: Measured | None = None
    # The counter of the energy since the driver was loaded; only some samples have it.
    energy_j: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    healthy: bool = True
    reason: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)
    # The driver's own figure, which leaves out what it reserves for itself; if unknown, total minus used.
    memory_free_bytes: Count | None = None
    unusable: str = ""
    condition: Condition | None = None
    # Whose card it is, by its name in `VENDORS`, where the source has cards of several vendors.
    vendor: str = ""
    # Whether it cannot be read because only other users may use it.
    withheld: bool = False
    # Since when a GPU that could be read before cannot be read.
    unread_since: Time | None = None
    # Whether its memory is the host's, which other programs and the page cache use too.
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

    @property
    def obstacle(self) -> str:
        """Why no job can run on a GPU that can be read; empty if one can."""
        return self.unusable or (self.condition.trouble[0] if self.condition else "")

    @property
    def is_latched(self) -> bool:
        """Whether it reports full use although no process has memory there, as Blackwell after a killed process.

        The reading stays at 100 % until a process creates a CUDA context.
        """
        unexplained = self.unexplained_bytes
        is_free = self.processes == () and unexplained is not None and unexplained <= CONTEXT_BYTES
        return is_free and (self.utilization or 0) >= LATCHED_PERCENT

    @property
    def unexplained_bytes(self) -> int | None:
        """The memory in use beyond that of the listed processes; None where that cannot be told."""
        if self.is_memory_shared:
            return None
        listed = [process.memory_used_bytes for process in self.processes or ()]
        sizes = [n_bytes for n_bytes in listed if n_bytes is not None]
        if self.memory_used_bytes is None or len(sizes) < len(listed):
            return None
        return max(0, self.memory_used_bytes - sum(sizes))

    @property
    def is_used_unseen(self) -> bool:
        """Whether the card is clearly in use by more than the listed processes.

        Utilisation alone is no sign: it is high on a card that the driver has just woken up, although nobody uses it.
        """
        unexplained = self.unexplained_bytes
        if unexplained is not None and unexplained > UNSEEN_BYTES:
            return True
        computes = not self.processes and (self.utilization or 0) > IDLE_PERCENT
        return computes and (unexplained is None or unexplained > CONTEXT_BYTES)


def samples_of(output: Iterable[msgspec.Raw]) -> tuple[GpuSample, ...]:
    """Decode the printed samples, one GPU at a time.

    A GPU that cannot be decoded is left out and does not hide the others.
    """
    samples = []
    for one in output:
        with contextlib.suppress(ValueError):
            samples.append(decode_as(bytes(one), GpuSample))
    return tuple(samples)


def is_identified(sample: GpuSample) -> bool:
    """Tell whether the card's identity is known, if only that it has no UUID; until then its UUID is a stand-in."""
    return sample.failed.get("uuid") != "unknown"


@dataclass(frozen=True, slots=True)
class GpuPair:
    """The connection of two GPUs: `path` as nvidia-smi calls it (PIX, PXB, PHB, NODE, SYS), None where unknown.

    `obstacle` says why one cannot read the other's memory; `peer_to_peer` is None where the driver does not tell.
    """

    first: int
    second: int
    path: str | None = None
    nvlink: bool = False
    peer_to_peer: bool | None = None
    obstacle: str = ""


class DriverFault(NamedTuple):
    """Something wrong with a vendor's driver although its cards can be read, and what to do about it."""

    sentence: str
    remedy: str


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts that do not change while the machine runs; `cuda` is the newest CUDA that the driver runs: (major, minor).

    `capabilities` and `nvlinks`, the number of links that are up, have an entry per GPU; `pairs` holds every two GPUs
    that can be read.
    """

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    capabilities: tuple[tuple[int, int] | None, ...] = ()
    nvlinks: tuple[int, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    faults: tuple[DriverFault, ...] = ()


class SourceUnavailable(Exception):
    """No GPU can be read at all: `reason` says why, `remedy` what to do about it.

    `is_broken` where there is something to repair, as opposed to a machine without GPUs.
    """

    def __init__(self, reason: str, remedy: str, *, is_broken: bool = False) -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy
        self.is_broken = is_broken


class GpuSource(Protocol):
    """A way to read GPUs. Every call may block for ever; each GPU is only read from its own thread."""

    name: str
    cuda: bool  # whether PyTorch runs on these GPUs as "cuda", as against CPU processes standing in

    def open(self) -> int:
        """Connect and return the number of GPUs; raise `SourceUnavailable`."""
        ...

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        """Read one GPU, its process list only if `processes`; return a fault of the card as a sample, never raise."""
        ...

    def facts(self) -> GpuFacts:
        """Return versions and how the cards are connected; what cannot be found out is left out."""
        ...

    def close(self) -> None: ...

"""What a GPU source answers: immutable samples in which `None` means "this sensor is not supported"."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    pid: int
    user: str | None
    name: str | None
    memory_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of one GPU. `timestamp` is seconds since the epoch.

    `healthy` is False for a card that cannot be read; `reason` says why in one clause. `failed` names
    the fields whose sensor raised an error, as against those that the card does not have.
    """

    index: int
    uuid: str
    name: str
    timestamp: float
    utilization: int | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    processes: tuple[GpuProcess, ...] | None = None
    healthy: bool = True
    reason: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory_free_bytes(self) -> int | None:
        if self.memory_total_bytes is None or self.memory_used_bytes is None:
            return None
        return max(0, self.memory_total_bytes - self.memory_used_bytes)


def identified(sample: GpuSample) -> bool:
    """Whether the card has answered who it is, if only that it has no UUID: until then its own is a stand-in."""
    return sample.failed.get("uuid") != "unknown"


@dataclass(frozen=True, slots=True)
class GpuPair:
    """How two GPUs reach each other: `path` as nvidia-smi calls it (PIX, PXB, PHB, NODE, SYS), None where unknown.

    `obstacle` says why one cannot read the other's memory; `peer_to_peer` is None where the driver does not tell.
    """

    first: int
    second: int
    path: str | None = None
    nvlink: bool = False
    peer_to_peer: bool | None = None
    obstacle: str = ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What does not change while the machine runs. `cuda` is the newest CUDA that the driver runs, as (major, minor).

    `capabilities` and `nvlinks`, the number of links that are up, have an entry per GPU; `pairs` are of those that
    can be read.
    """

    driver: str | None = None
    cuda: tuple[int, int] | None = None
    capabilities: tuple[tuple[int, int] | None, ...] = ()
    nvlinks: tuple[int, ...] = ()
    pairs: tuple[GpuPair, ...] = ()


class SourceUnavailable(Exception):
    """No GPU can be read at all: which of the reasons it is, and what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}" if remedy else reason)
        self.reason = reason
        self.remedy = remedy


class GpuSource(Protocol):
    """A way to read GPUs. Every call may block for ever; each GPU is only read from its own thread."""

    name: str
    cuda: bool  # whether jobs on these GPUs run CUDA, as against CPU processes standing in

    def open(self) -> int:
        """Connects and returns the number of GPUs; raises `SourceUnavailable`."""
        ...

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        """Reads one GPU, its process list only when asked; a fault of the card is a sample, never raised."""
        ...

    def facts(self) -> GpuFacts:
        """Versions and how the cards are connected; what cannot be known is left out."""
        ...

    def close(self) -> None: ...

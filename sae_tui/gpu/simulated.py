"""Simulated GPUs for the demo, tests and screenshots. Jobs on simulated GPUs run on the CPU."""

from __future__ import annotations

import getpass
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, starmap
from typing import TYPE_CHECKING

from sae_tui.gpu.base import Condition, GpuFacts, GpuPair, GpuProcess, GpuSample, ProcessShares
from sae_tui.gpu.faults import LOST
from sae_tui.gpu.nvml_faults import NO_PEER
from trainer.contract.errors import UserError

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails

ENV_FAULTS = "SAE_TUI_SIMULATED_FAULTS"
FAULTS = ("lost", "no_power", "hang")
LARGEST_COUNT = 64
UUID_PREFIX = "GPU-51a0-sim-"
GIB = 1 << 30
MIB = 1 << 20
IDLE_MEMORY_BYTES = 922 * MIB
IDLE_POWER_W = 24.0
IDLE_TEMPERATURE_C = 33.0
BUSY_TEMPERATURE_C = 74.0
SLOWDOWN_C = 93
_AT_POWER_LIMIT = 0.98
WARM_UP_S = 45.0  # The time constant for heating and cooling.
_BANDWIDTH_SHARE = 0.6  # Memory bandwidth use relative to the utilisation.

Occupied = Callable[[], Mapping[str, tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class _GpuModel:
    name: str
    memory_bytes: int
    power_limit_w: float
    foreign: GpuProcess | None = None


_RTX_3090 = _GpuModel("NVIDIA GeForce RTX 3090", 24 * GIB, 350.0)
_RTX_3080 = _GpuModel("NVIDIA GeForce RTX 3080", 10 * GIB, 320.0)
_TAKEN = _GpuModel(
    "NVIDIA GeForce RTX 3090", 24 * GIB, 350.0, GpuProcess(31415, "mallory", "python train.py", 21 * GIB, kind="C")
)  # fmt: skip
BOX = (_RTX_3090, _RTX_3090, _RTX_3080, _TAKEN)


class Simulated:
    """Simulates a machine with four GPUs, one of them used by another user; a larger `count` repeats the four GPUs.

    `occupied` returns a dict mapping the UUID of each GPU used by our jobs to the job's pid and memory in bytes.
    `occupied` may be called from any thread. All GPU values are computed from `occupied` and the clock.
    """

    name = "simulated"
    cuda = False

    def __init__(
        self,
        count: int = len(BOX),
        *,
        clock: Callable[[], float] = time.time,
        occupied: Occupied = dict,
        faults: Mapping[int, str] | None = None,
    ) -> None:
        if not 1 <= count <= LARGEST_COUNT:
            raise UserError(f"the number of simulated GPUs must be 1 to {LARGEST_COUNT}, not {count}")
        faults = faults_of(os.environ.get(ENV_FAULTS, "")) if faults is None else faults
        self._clock = clock
        self._gpus = tuple(_SimulatedGpu(index, occupied, faults.get(index)) for index in range(count))

    def open(self) -> int:
        return len(self._gpus)

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        return self._gpus[index].sample(self._clock(), processes)

    def details(self, index: int, sample: GpuSample) -> GpuDetails:
        return self._gpus[index].details(self._clock(), sample)

    def shares(self, index: int, sample: GpuSample) -> Mapping[int, ProcessShares]:
        """Return shares that divide the GPU's utilisation equally among its processes; the video units are unused."""
        pids = [process.pid for process in sample.processes or ()]
        each = (sample.utilization or 0) / max(1, len(pids))
        return dict.fromkeys(pids, ProcessShares(round(each), round(_BANDWIDTH_SHARE * each), 0, 0))

    def facts(self) -> GpuFacts:
        """Return facts in which each CPU socket has four GPUs, with NVLink between the first two."""
        n_gpus = len(self._gpus)
        pairs = tuple(starmap(_pair, combinations(range(n_gpus), 2)))
        bridged = {index for pair in pairs if pair.nvlink for index in (pair.first, pair.second)}
        nvlinks = tuple(4 * (index in bridged) for index in range(n_gpus))
        return GpuFacts(capabilities=((8, 6),) * n_gpus, nvlinks=nvlinks, pairs=pairs)

    def close(self) -> None:
        pass


def _pair(first: int, second: int) -> GpuPair:
    path = "PHB" if first // 4 == second // 4 else "SYS"
    nvlink = first % 4 == 0 and second == first + 1
    return GpuPair(first, second, path, nvlink, nvlink, "" if nvlink else NO_PEER[2])


def uuid_of(index: int) -> str:
    """Return a simulated GPU's UUID, which is the same in every process."""
    return f"{UUID_PREFIX}{index}"


def is_simulated(uuid: str) -> bool:
    """Return whether a UUID, for example in the stored history, belongs to a simulated GPU."""
    return uuid.startswith(UUID_PREFIX)


def faults_of(text: str) -> dict[int, str]:
    """Parse a string like "1:lost,2:no_power" into a dict mapping GPU indices to faults.

    Raise `UserError` if the string is invalid.
    """
    fault_by_index: dict[int, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        index, _, fault = part.partition(":")
        if not index.isdecimal() or fault not in FAULTS:
            raise UserError(f'{ENV_FAULTS} takes INDEX:FAULT, where FAULT is {" or ".join(FAULTS)}, not "{part}"')
        fault_by_index[int(index)] = fault
    return fault_by_index


class _SimulatedGpu:
    def __init__(self, index: int, occupied: Occupied, fault: str | None) -> None:
        self._index = index
        self._kind = BOX[index % len(BOX)]
        self._occupied = occupied
        self._fault = fault
        self._heat = _Heat(hot=self._kind.foreign is not None)

    def sample(self, now: float, processes: bool) -> GpuSample:
        kind, uuid = self._kind, uuid_of(self._index)
        if self._fault == "hang":
            threading.Event().wait()
        if self._fault == "lost":
            return GpuSample(self._index, uuid, kind.name, now, healthy=False, reason=LOST)
        running = self._running(uuid)
        utilization = self._utilization(now, busy=bool(running))
        power = IDLE_POWER_W + (0.93 * kind.power_limit_w - IDLE_POWER_W) * utilization / 100
        used = IDLE_MEMORY_BYTES + sum(process.memory_used_bytes or 0 for process in running)
        return GpuSample(
            self._index, uuid, kind.name, now,
            utilization=round(utilization),
            memory_used_bytes=min(used, kind.memory_bytes),
            memory_total_bytes=kind.memory_bytes,
            temperature_c=round(self._heat.temperature(now, busy=bool(running)) + self._index % 3),
            power_w=None if self._fault == "no_power" else round(power, 1),
            power_limit_w=kind.power_limit_w,
            processes=running if processes else None,
            condition=_condition(utilization / 100) if processes else None,
        )  # fmt: skip

    def details(self, now: float, sample: GpuSample) -> GpuDetails:
        """Return details that match the utilisation in the sample."""
        from sae_tui.gpu.details import GpuDetails

        busy = (sample.utilization or 0) / 100
        return GpuDetails(
            now,
            condition=replace(_condition(busy), compute_mode="shared"),
            memory_bandwidth_percent=round(100 * _BANDWIDTH_SHARE * busy),
            memory_reserved_bytes=300 * MIB,
            most_sm_clock_mhz=2100,
            memory_clock_mhz=9501 if busy else 405,
            most_memory_clock_mhz=9751,
            energy_j=3.6e6 * (self._index + 1),
            pcie_generation=4 if busy else 1,
            most_pcie_generation=4,
            pcie_width=16,
            most_pcie_width=16,
            pcie_received_bytes_s=2.1e9 * busy,
            pcie_sent_bytes_s=0.4e9 * busy,
            nvlinks=4 * (self._index % 4 < 2),
            encoder_percent=0,
            decoder_percent=0,
            persistence=True,
            bus_id=f"00000000:{self._index + 1:02X}:00.0",
        )

    def _running(self, uuid: str) -> tuple[GpuProcess, ...]:
        """Return the other user's process and our job's process on the GPU, if they exist."""
        foreign = (self._kind.foreign,) if self._kind.foreign else ()
        if uuid not in (occupied := self._occupied()):
            return foreign
        pid, n_bytes = occupied[uuid]
        return (*foreign, GpuProcess(pid, _user(), "python -m trainer", n_bytes, kind="C"))

    def _utilization(self, now: float, *, busy: bool) -> float:
        """Return the utilisation in percent: 0 if idle, 80 to 95 for our job, or about 97 for another user's job."""
        if not busy:
            return 0.0
        wave = 0.6 * math.sin(now / 3.7 + self._index) + 0.4 * math.sin(now / 1.3 + 2 * self._index)
        return 97 + 2 * wave if self._kind.foreign else 87.5 + 7.5 * wave


class _Heat:
    """A GPU temperature that approaches the idle or busy value exponentially."""

    def __init__(self, *, hot: bool) -> None:
        self._busy = hot
        self._from = BUSY_TEMPERATURE_C if hot else IDLE_TEMPERATURE_C
        self._since = 0.0

    def temperature(self, now: float, *, busy: bool) -> float:
        if busy != self._busy:
            self._from, self._since, self._busy = self._at(now), now, busy
        return self._at(now)

    def _at(self, now: float) -> float:
        target = BUSY_TEMPERATURE_C if self._busy else IDLE_TEMPERATURE_C
        return target + (self._from - target) * math.exp(-max(0.0, now - self._since) / WARM_UP_S)


def _condition(busy: float) -> Condition:
    """Return the condition of a GPU at utilisation `busy` (0 to 1); from 0.98 up, the power limit throttles it."""
    return Condition(
        sm_clock_mhz=round(1485 * busy) + 210,
        performance_state=2 if busy else 8,
        fan_percent=round(30 + 50 * busy),
        slowed_by=("power limit reached",) if busy >= _AT_POWER_LIMIT else (),
        slowdown_c=SLOWDOWN_C,
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Some containers have no entry in /etc/passwd.
        return str(os.getuid())

"""Reads an NVIDIA GPU's details from NVML.

This takes five driver calls each time the processes are listed, and about two dozen while the GPU's page is open.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sae_tui.gpu.base import NO_COMPUTING, ONE_PROCESS, THROTTLING, Condition, ProcessShares, Xid
from sae_tui.gpu.nvml_faults import MISSING, NOT_SUPPORTED
from trainer.contract.printable import printable

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails, Instance


_CRITICAL = 8  # NVML's event type for Xid errors.
_MOST_AT_ONCE = 100
# Xid errors that occur during training. NVIDIA's "XID Errors" document lists about 150 errors.
WORDS = {
    13: "a kernel used an illegal address or instruction",
    31: "a kernel accessed memory that it may not use",
    43: "a kernel hung or was reset, and its program was killed",
    45: "a program was killed during a computation",
    46: "the GPU stopped computing; reset the GPU",
    48: "the memory had errors that could not be corrected; reset the GPU",
    61: "the GPU's firmware failed",
    62: "the GPU's firmware halted",
    63: "a row of the memory was replaced",
    64: "a row of the memory could not be replaced",
    68: "the video engine failed",
    74: "NVLink failed",
    79: "the GPU has fallen off the bus",
    92: "many memory errors were corrected",
    94: "a memory error killed one program; the others continue",
    95: "a memory error was not contained; reset the GPU",
    119: "the GPU's firmware does not respond",
    120: "the GPU's firmware failed",
    140: "memory errors could not be corrected",
}


# Xid errors that, according to NVIDIA's list, require a reset, a repair or a new GPU.
FATAL = frozenset({46, 48, 62, 63, 64, 74, 79, 94, 95, 119, 120, 140})


def in_words(number: int) -> str:
    """Describe an Xid error, like `Xid 79: the GPU has fallen off the bus`."""
    words = WORDS.get(number)
    return f"Xid {number}: {words}" if words else f"Xid {number}, see NVIDIA's list of Xid errors"


class XidListener:
    """Listens for Xid errors on one GPU."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._events: Any = None
        self._listens_to: Any = None
        self._last: Xid | None = None

    def poll(self, handle: Any) -> Xid | None:
        """Return the latest fatal error since the first call, or the latest error if none was fatal; do not wait."""
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            if self._listens_to is not handle:
                self._listen(handle)
            # Each call returns one event. If there is no event, NVML raises a timeout error, which ends the loop.
            for _ in range(_MOST_AT_ONCE if self._events is not None else 0):
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
                number = int(event.eventData)
                # A later non-fatal error must not hide a fatal error.
                if number in FATAL or not (self._last and self._last.is_fatal):
                    self._last = Xid(number, time.time(), in_words(number), number in FATAL)
        return self._last

    def _listen(self, handle: Any) -> None:
        """Register for the GPU's error events; after a failure, do not retry with the same handle."""
        self._listens_to, before, self._events = handle, self._events, None
        if before is not None:
            self._nvml.nvmlEventSetFree(before)
        events = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(handle, _CRITICAL, events)
        self._events = events


_VERSION = 1
# NVML's metric numbers, in the field order of `Activity`.
_METRICS = (2, 3, 5)


@dataclass(frozen=True, slots=True)
class Activity:
    """A GPU's activity in percent; unknown values are None.

    `sm` is the share of busy multiprocessors, `occupancy` is the number of active warps relative to the maximum, and
    `tensor` is the share of time the tensor cores are busy.
    """

    sm: float | None = None
    occupancy: float | None = None
    tensor: float | None = None


class ActivityReader:
    """Measures a GPU's activity between two reads; queries an unsupported GPU only once."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._samples: list[Any] | None = None

    def read(self, handle: Any) -> Activity:
        """Return the activity since the last read; it is unknown on the first read and on unsupported GPUs."""
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            if self._samples is None:
                self._samples = []
                if self._nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                    self._samples = [self._nvml.nvmlGpmSampleAlloc() for _ in range(2)]
                    self._nvml.nvmlGpmSampleGet(handle, self._samples[1])
            elif self._samples:
                # Overwrite the older sample.
                self._samples.reverse()
                self._nvml.nvmlGpmSampleGet(handle, self._samples[1])
                return self._between(*self._samples)
        return Activity()

    def _between(self, first: Any, second: Any) -> Activity:
        asked = self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics, asked.sample1, asked.sample2 = _VERSION, len(_METRICS), first, second
        for place, metric in enumerate(_METRICS):
            asked.metrics[place].metricId = metric
        self._nvml.nvmlGpmMetricsGet(asked)
        answers = asked.metrics[: len(_METRICS)]
        return Activity(*(None if one.nvmlReturn else one.value for one in answers))


# NVML's constants.
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_SLOWDOWN = 1
_CORRECTED, _UNCORRECTED, _SINCE_RESET = 0, 1, 0
_SENT, _RECEIVED = 0, 1
_MEMORY_V2 = 0x2000028
_MOST_NVLINKS = 18
# Throttling reasons by bit. "Idle" is omitted: an idle GPU lowers its clocks only because it has no work.
SLOWED_BY = {
    0x002: "clocks were set (nvidia-smi -ac)",
    0x004: "power limit reached",
    0x008: THROTTLING[0],
    0x010: "kept in step with other GPUs (sync boost)",
    0x020: THROTTLING[1],
    0x040: THROTTLING[2],
    0x080: THROTTLING[3],
    0x100: "clocks follow the display",
}
_IDLE = 0x001
# Memory errors and the compute mode rarely change.
HEALTH_EVERY_S = 8.0
COMPUTE_MODES = {0: "shared", 1: ONE_PROCESS, 2: NO_COMPUTING, 3: ONE_PROCESS}
# The ID of the NVML field that says what recovery action the driver needs after an error, and the meanings of its
# values.
_RECOVERY_FIELD = 230
RECOVERIES: Mapping[int | None, str] = {
    0: "",
    1: "a reset",
    2: "a reboot of the machine",
    3: "all programs that use peer-to-peer to exit",
    4: "its programs to exit, and then a reset",
    5: "its IMEX domain to be recovered",
    6: "a reset of its PCIe bus",
    7: "a reboot of the machine",
}
# Maps the type of a field's value to the union member containing the value.
_UNSIGNED = {1: "uiVal", 2: "ulVal", 3: "ullVal"}
_REMAPPING = "nvmlDeviceGetRemappedRows"
_RETIRING = "nvmlDeviceGetRetiredPagesPendingStatus"  # The equivalent for GPUs before Ampere.


class NvmlDetails:
    """Reads the details of one GPU, on that GPU's thread."""

    def __init__(self, nvml: ModuleType) -> None:
        self._nvml = nvml
        self._activity: ActivityReader | None = None
        self._errors = XidListener(nvml)
        self._slowdown_c: int | None = None
        self._health, self._health_due = Condition(), 0.0
        # Functions not supported by this GPU, recorded so that they are not called again.
        self._missing: set[str] = set()

    def condition(self, handle: Any, *, whole: bool = True) -> Condition:
        """Return the GPU's health and, if `whole`, also its clocks.

        This takes up to ten driver calls. The first call with `whole` also reads the slowdown temperature.
        """
        if time.monotonic() >= self._health_due:
            self._health, self._health_due = self._read_health(handle), time.monotonic() + HEALTH_EVERY_S
        usable = replace(self._health, xid=self._errors.poll(handle))
        if not whole:
            return usable
        if self._slowdown_c is None:
            self._slowdown_c = self._ask("nvmlDeviceGetTemperatureThreshold", handle, _SLOWDOWN)
        return replace(
            usable,
            sm_clock_mhz=self._ask("nvmlDeviceGetClockInfo", handle, _SM_CLOCK),
            performance_state=self._ask("nvmlDeviceGetPerformanceState", handle),
            fan_percent=self._ask("nvmlDeviceGetFanSpeed", handle),
            slowed_by=self._slowed_by(handle),
            slowdown_c=self._slowdown_c,
        )

    def _read_health(self, handle: Any) -> Condition:
        ecc = self._ask_if_any("nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _SINCE_RESET)
        rows = self._ask_if_any(_REMAPPING, handle)
        pages = self._ask_if_any(_RETIRING, handle) if _REMAPPING in self._missing else None
        return Condition(
            compute_mode=COMPUTE_MODES.get(self._ask_if_any("nvmlDeviceGetComputeMode", handle)),
            ecc_uncorrected=ecc,
            rows_pending=bool(rows[2]) if rows is not None else None if pages is None else bool(pages),
            rows_failed=None if rows is None else bool(rows[3]),
            recovery=RECOVERIES.get(self._read_field(handle, _RECOVERY_FIELD)),
        )

    def _read_field(self, handle: Any, field: int) -> int | None:
        """Return the value of the NVML field with this number, or None; never read an unsupported field twice."""
        name = f"field {field}"
        if name in self._missing:
            return None
        (answer,) = self._ask_if_any("nvmlDeviceGetFieldValues", handle, [field]) or (None,)
        if answer is None or answer.nvmlReturn:
            if answer is not None and answer.nvmlReturn in (MISSING | {NOT_SUPPORTED}):
                self._missing.add(name)
            return None
        kind = _UNSIGNED.get(answer.valueType)
        return None if kind is None else int(getattr(answer.value, kind))

    def read(self, handle: Any) -> GpuDetails:
        """Return the GPU's details; values from sensors that do not respond are None."""
        from sae_tui.gpu.details import GpuDetails

        ask = self._ask
        self._activity = self._activity or ActivityReader(self._nvml)
        activity = self._activity.read(handle)
        utilization = ask("nvmlDeviceGetUtilizationRates", handle)
        memory = ask("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
        energy_mj = ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        rows = ask("nvmlDeviceGetRemappedRows", handle)
        encoder, decoder = (ask(f"nvmlDeviceGet{one}Utilization", handle) for one in ("Encoder", "Decoder"))
        pci = ask("nvmlDeviceGetPciInfo", handle)
        persistence = ask("nvmlDeviceGetPersistenceMode", handle)
        return GpuDetails(
            timestamp=time.time(),
            condition=self.condition(handle),
            memory_bandwidth_percent=None if utilization is None else utilization.memory,
            memory_reserved_bytes=None if memory is None else int(getattr(memory, "reserved", 0)),
            most_sm_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, _SM_CLOCK),
            memory_clock_mhz=ask("nvmlDeviceGetClockInfo", handle, _MEMORY_CLOCK),
            most_memory_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", handle, _MEMORY_CLOCK),
            energy_j=None if energy_mj is None else energy_mj / 1000,
            pcie_generation=ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
            most_pcie_generation=ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
            pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
            most_pcie_width=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
            pcie_received_bytes_s=self._pcie(handle, _RECEIVED),
            pcie_sent_bytes_s=self._pcie(handle, _SENT),
            nvlinks=self._nvlinks(handle),
            ecc_corrected=ask("nvmlDeviceGetTotalEccErrors", handle, _CORRECTED, _SINCE_RESET),
            remapped_rows=None if rows is None else rows[0] + rows[1],
            encoder_percent=None if encoder is None else encoder[0],
            decoder_percent=None if decoder is None else decoder[0],
            persistence=None if persistence is None else bool(persistence),
            bus_id=None if pci is None else text(pci.busId),
            sm_percent=activity.sm,
            occupancy_percent=activity.occupancy,
            tensor_percent=activity.tensor,
            instances=self._instances(handle),
            driver=self._versions[0],
            cuda=self._versions[1],
        )

    @functools.cached_property
    def _versions(self) -> tuple[str | None, tuple[int, int] | None]:
        """The driver version, and the latest CUDA version it supports."""
        newest = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        return text(self._ask("nvmlSystemGetDriverVersion")), cuda_version(newest)

    def _instances(self, handle: Any) -> tuple[Instance, ...]:
        """Return a GPU's slices, or () if the GPU is not split."""
        from sae_tui.gpu.details import Instance

        parts = []
        for place in range(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            part = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, place)
            if part is not None:
                name, memory = self._ask("nvmlDeviceGetName", part), self._ask("nvmlDeviceGetMemoryInfo", part)
                sizes = (None, None) if memory is None else (int(memory.used), int(memory.total))
                parts.append(Instance(text(name) or "MIG", *sizes))
        return tuple(parts)

    def _slowed_by(self, handle: Any) -> tuple[str, ...] | None:
        bits = self._ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if bits is None:
            bits = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if bits is None:
            return None
        unknown = bits & ~(sum(SLOWED_BY) | _IDLE)
        known = tuple(words for bit, words in SLOWED_BY.items() if bits & bit)
        return (*known, f"for an unknown reason ({unknown:#x})") if unknown else known

    def _pcie(self, handle: Any, direction: int) -> float | None:
        """Return the PCI Express traffic in one direction, in bytes/s; NVML blocks for 20 ms to measure it."""
        kilobytes: int | None = self._ask("nvmlDeviceGetPcieThroughput", handle, direction)
        return None if kilobytes is None else kilobytes * 1024.0

    def _nvlinks(self, handle: Any) -> int | None:
        states = [self._ask("nvmlDeviceGetNvLinkState", handle, link) for link in range(_MOST_NVLINKS)]
        return None if states[0] is None else states.count(1)

    def shares(self, handle: Any) -> dict[int, ProcessShares]:
        """Return a dict mapping each process's pid to its shares of the GPU; impossible values become None."""
        samples = sorted(
            self._ask("nvmlDeviceGetProcessUtilization", handle, 0) or (), key=lambda sample: sample.timeStamp
        )
        return {
            sample.pid: ProcessShares(*map(_share, (sample.smUtil, sample.memUtil, sample.encUtil, sample.decUtil)))
            for sample in samples
        }

    def _ask_if_any(self, function: str, handle: Any, *arguments: Any) -> Any:
        """Return an NVML function's result, or None; never call an unsupported function twice."""
        if function in self._missing:
            return None
        try:
            return getattr(self._nvml, function)(handle, *arguments)
        except AttributeError:  # An older pynvml lacks this function.
            self._missing.add(function)
        except self._nvml.NVMLError as error:
            if error.value in (MISSING | {NOT_SUPPORTED}):
                self._missing.add(function)
        return None

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return an NVML function's result, or None if the driver, pynvml or the GPU does not support it."""
        with contextlib.suppress(self._nvml.NVMLError, AttributeError, UnicodeDecodeError):
            return getattr(self._nvml, function)(*arguments)
        return None


def _share(percent: int) -> int | None:
    return percent if 0 <= percent <= 100 else None


def text(answer: str | bytes | None) -> str | None:
    """Decode text from NVML and replace unprintable characters; None is returned unchanged."""
    words = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer
    return words and printable(words)


def cuda_version(number: int | None) -> tuple[int, int] | None:
    """Convert NVML's CUDA version, such as 12040, to (12, 4)."""
    return None if number is None else divmod(number // 10, 100)

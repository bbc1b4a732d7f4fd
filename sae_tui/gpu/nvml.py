"""Reads NVIDIA GPUs through NVML. Loading pynvml takes 70 ms, so only `open` loads it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sae_tui.gpu import nvml_faults as faults
from sae_tui.gpu.base import Condition, GpuFacts, GpuPair, GpuProcess, GpuSample, ProcessKind, ProcessShares
from sae_tui.gpu.nvml_details import NvmlDetails, cuda_version, text
from sae_tui.gpu.nvml_library import has_renewed, load_pynvml
from sae_tui.gpu.nvml_memory import MEMORY, SLICE_MEMORY, MemoryKind, sizes
from sae_tui.gpu.nvml_slices import SliceLocation, places_of, slices
from sae_tui.gpu.owner import process_on_gpu

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails
    from sae_tui.gpu.ring import RingReading

# If reading a GPU's four main sensors takes longer than this, the other sensors are skipped.
SLOW_S = 0.1
LARGEST_PID = 1 << 22  # Linux's limit. Drivers 535.43 to 535.86 return pids like 4294967295.
COMPUTE = (("nvmlDeviceGetComputeRunningProcesses_v3",), ("nvmlDeviceGetComputeRunningProcesses_v2",))
GRAPHICS = (("nvmlDeviceGetGraphicsRunningProcesses_v3",), ("nvmlDeviceGetGraphicsRunningProcesses_v2",))
ENERGY_EVERY = 10
# A GPU's process list may be reread early, for example on request, but its condition is reread at most this often.
CONDITION_EVERY_S = 2.5
SLOW_CONDITION_EVERY_S = 30.0
# An upper bound on how many times a process opens the driver.
_MOST_OPENED = 16
MIG_MODE = (("nvmlDeviceGetMigMode",),)
TEMPERATURE = (("nvmlDeviceGetTemperature", 0), ("nvmlDeviceGetTemperatureV", 0))
UTILIZATION = (("nvmlDeviceGetUtilizationRates",),)
POWER = (("nvmlDeviceGetPowerUsage",),)
POWER_LIMIT = (("nvmlDeviceGetEnforcedPowerLimit",), ("nvmlDeviceGetPowerManagementLimit",))
ENERGY = (("nvmlDeviceGetTotalEnergyConsumption",),)  # In mJ; not supported by GPUs before Volta.
NAME = (("nvmlDeviceGetName",),)
UUID = (("nvmlDeviceGetUUID",),)
# NVML's codes for the path between two GPUs.
PATHS = {0: "internal", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
# NVML's codes for queries about two GPUs. pynvml's constant for the first code is mistakenly a tuple.
PEER_READ, PEER_NVLINK = 0, 2
MOST_NVLINKS = 36
Variants = tuple[tuple[Any, ...], ...]


class Nvml:
    """All NVIDIA GPUs on this machine, with the same indices as in NVML, which do not change when a GPU fails.

    MIG slice indices follow the GPU indices.
    """

    name = "nvml"
    cuda = True

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: tuple[_NvmlGpu, ...] = ()

    def open(self) -> int:
        self._nvml = load_pynvml()
        self._initialise()
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            self.close()
            raise faults.source(error.value) from None
        if not count:
            self.close()
            raise faults.no_gpus()
        parts = slices(self._nvml, count)
        gpus = [_NvmlGpu(self._nvml, index, [part for part in parts if part.gpu == index]) for index in range(count)]
        self._gpus = (*gpus, *(_Slice(self._nvml, index, place) for index, place in enumerate(parts, start=count)))
        return len(self._gpus)

    def _initialise(self, *, may_renew: bool = True) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            if not (may_renew and error.value == faults.MISMATCH and has_renewed(self._nvml)):
                raise faults.source(error.value) from None
            self._initialise(may_renew=False)

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        return self._gpus[index].sample(processes=processes)

    def details(self, index: int, sample: GpuSample) -> GpuDetails:
        return self._gpus[index].details(sample)

    def shares(self, index: int, sample: GpuSample) -> Mapping[int, ProcessShares]:
        return self._gpus[index].shares() if sample.processes else {}

    def buffered(self, index: int) -> tuple[RingReading, ...]:
        return self._gpus[index].buffered()

    def facts(self) -> GpuFacts:
        handles = [self._ask("nvmlDeviceGetHandleByIndex", gpu.gpu) for gpu in self._gpus]
        whole = {gpu.index for gpu in self._gpus if gpu.index == gpu.gpu}
        readable = [(index, handle) for index, handle in enumerate(handles) if handle is not None and index in whole]
        cuda = self._ask("nvmlSystemGetCudaDriverVersion_v2")
        capabilities = [self._ask("nvmlDeviceGetCudaComputeCapability", handle) for handle in handles]
        return GpuFacts(
            driver=text(self._ask("nvmlSystemGetDriverVersion")),
            cuda=cuda_version(cuda),
            capabilities=tuple(version and (version[0], version[1]) for version in capabilities),
            nvlinks=tuple(self._nvlinks(handle) if index in whole else 0 for index, handle in enumerate(handles)),
            pairs=tuple(self._pair(*one, *other) for one, other in combinations(readable, 2)),
        )

    def _nvlinks(self, handle: Any) -> int:
        return sum(self._ask("nvmlDeviceGetNvLinkState", handle, link) == 1 for link in range(MOST_NVLINKS))

    def _pair(self, first: int, handle: Any, second: int, other: Any) -> GpuPair:
        peer = self._ask("nvmlDeviceGetP2PStatus", handle, other, PEER_READ)
        return GpuPair(
            first,
            second,
            path=PATHS.get(self._ask("nvmlDeviceGetTopologyCommonAncestor", handle, other)),
            nvlink=self._ask("nvmlDeviceGetP2PStatus", handle, other, PEER_NVLINK) == 0,
            peer_to_peer=None if peer is None else peer == 0,
            obstacle=faults.NO_PEER.get(peer, "the driver does not report why") if peer else "",
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return an NVML function's result, or None if the driver, pynvml or the GPU does not support it."""
        if None in arguments:
            return None
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            return getattr(self._nvml, function)(*arguments)
        return None

    def hurry(self) -> None:
        for gpu in self._gpus:
            gpu.is_hurried = True

    @property
    def must_reopen(self) -> bool:
        """True if the driver was reloaded, or if its GPUs or slices have changed since it was opened."""
        return any(gpu.is_stale for gpu in self._gpus)

    def close(self) -> None:
        """Close NVML.

        NVML counts `nvmlInit` calls, so if the driver must be reopened, undo all calls made by this process.
        """
        with contextlib.suppress(self._nvml.NVMLError):
            for _ in range(_MOST_OPENED if self.must_reopen else 1):
                self._nvml.nvmlShutdown()


class _GpuFault(Exception):
    """Raised if a GPU cannot be read at all; contains NVML's error code."""

    def __init__(self, code: int) -> None:
        super().__init__(faults.gpu(code))
        self.code = code


class _NvmlGpu:
    """One NVIDIA GPU.

    Values that never change are read once per handle. After a fault, a new handle is requested so that the GPU can
    recover. The UUID, power limit and MIG mode rarely change, so they are reread only together with the processes. If
    `is_stale`, the driver must be reopened before the GPU can be read again.
    """

    def __init__(self, nvml: ModuleType, index: int, slices: Sequence[SliceLocation] = ()) -> None:
        # The index in this source, and NVML's index for the GPU. The two indices differ only for a slice.
        self.index = self.gpu = index
        # True if reads skip optional values because the driver is about to be closed.
        self.is_hurried = False
        self.is_stale = False
        self.slices = list(slices)
        self._nvml, self._has_slices = nvml, bool(slices)
        self._handle: Any = None
        self._static: dict[str, Any] = {}
        # The last known UUID and name, kept while the GPU cannot be read.
        self._identity: dict[str, Any] = {}
        self._variant: dict[Variants, int] = {}
        self._failed: dict[str, str] = {}
        self._answered = False
        self._fault: int | None = None
        self._n_listed = 0
        self._details = NvmlDetails(nvml)
        self._condition: Condition | None = None
        self._condition_due = 0.0
        self._memory: MemoryKind | None = None

    def sample(self, *, processes: bool) -> GpuSample:
        self._failed = {}
        try:
            fields = self._read(processes)
        except _GpuFault as fault:
            self._handle = None
            self._failed = {}
            self.is_stale = self.is_stale or fault.code in faults.STALE
            fields = {"healthy": False, "reason": str(fault), "withheld": fault.code in faults.WITHHELD}
        return GpuSample(
            index=self.index, uuid=self._uuid(), name=text(self._identity.get("name")) or "NVIDIA GPU",
            timestamp=time.time(), failed=self._failed, **fields,
        )  # fmt: skip

    def details(self, sample: GpuSample) -> GpuDetails:
        """Return the GPU's details; all fields are None if the GPU cannot be read."""
        from sae_tui.gpu.details import GpuDetails

        handle = self._handle
        return GpuDetails(time.time()) if handle is None else self._details.read(handle)

    def shares(self) -> Mapping[int, ProcessShares]:
        """Return a dict mapping each process's pid to its shares of the GPU, empty if the GPU cannot be read."""
        return {} if self._handle is None else self._details.shares(self._handle)

    def buffered(self) -> tuple[RingReading, ...]:
        """Return the readings buffered by the driver, or () if the GPU cannot be read."""
        from sae_tui.gpu.nvml_buffer import buffered

        return () if self._handle is None else buffered(self._nvml, self._handle)

    def _read(self, processes: bool) -> dict[str, Any]:
        """Return a healthy sample's fields; raise `_GpuFault` if the GPU cannot be read.

        This takes four driver calls, plus up to six for rarely changing values.
        """
        self._identify(again=processes)
        power_limit = self._once("power_limit_w", POWER_LIMIT)
        mig = self._once("mig", MIG_MODE)
        is_split = bool(mig and mig[0])
        self._answered, self._fault = False, None
        began = time.monotonic()
        utilization = self._get("utilization", UTILIZATION)
        memory = self._get("memory_used_bytes", MEMORY)
        temperature = self._get("temperature_c", TEMPERATURE)
        power = self._get("power_w", POWER)
        if self._fault is not None and not self._answered:
            raise _GpuFault(self._fault)
        is_quick = time.monotonic() - began < SLOW_S
        processes = processes and not self.is_hurried
        energy = self._energy() if processes and is_quick else None
        if processes:
            self._look_for_slices(is_split)
        found = None if not processes else () if is_split and self._has_slices else self._processes()
        processes = processes and not self.is_hurried
        return {
            "utilization": None if utilization is None else utilization.gpu,
            # Omit a split GPU's memory and processes, which are included in its slices' samples.
            **sizes(None if is_split and self._has_slices else memory, self._memory_kind(memory)),
            "temperature_c": _signed(temperature),
            "power_w": None if power is None else power / 1000,
            "power_limit_w": None if power_limit is None else power_limit / 1000,
            "energy_j": None if energy is None else energy / 1000,
            "processes": found,
            "condition": self._read_condition(self._handle, whole=is_quick) if processes else None,
            "unusable": "" if not is_split else faults.SPLIT if self._has_slices else faults.UNCUT,
        }

    def _identify(self, *, again: bool) -> None:
        """Get a handle unless one exists; read the UUID and name with each new handle, or if `again`.

        If another GPU now has this index, discard everything known about the previous GPU.
        """
        is_new = self._handle is None
        if is_new:
            self._static, self._condition_due = {}, 0.0
            self._handle = self._look_up()
        elif again:
            # `nvidia-smi -pl` and `nvidia-smi -mig` may change the power limit and the MIG mode while the app runs.
            for field in ("power_limit_w", "mig", *(("uuid",) if time.monotonic() >= self._condition_due else ())):
                self._static.pop(field, None)
        before = self._identity.get("uuid")
        self._once("uuid", UUID)
        if not is_new and before is not None:
            # A failed read of the UUID through the same handle does not mean that the GPU was replaced.
            self._failed.pop("uuid", None)
        if before is not None and self._static.get("uuid", None if is_new else before) != before:
            self._static.pop("name", None)
            self._identity, self._condition, self._memory = {}, None, None
            self._details = NvmlDetails(self._nvml)
        self._once("name", NAME)
        self._identity = self._identity | {key: self._static[key] for key in ("uuid", "name") if key in self._static}

    def _look_for_slices(self, is_split: bool) -> None:
        """Detect slices created or destroyed since the driver was opened."""
        if is_split or self._has_slices:
            self.is_stale = self.is_stale or places_of(self._nvml, self.index) != self.slices

    def _read_condition(self, handle: Any, *, whole: bool) -> Condition:
        """Return the condition, rereading it if due; unless `whole`, read only the GPU's health, not its clocks."""
        if self._condition is None or time.monotonic() >= self._condition_due:
            self._condition = self._details.condition(handle, whole=whole)
            self._condition_due = time.monotonic() + (CONDITION_EVERY_S if whole else SLOW_CONDITION_EVERY_S)
        return self._condition

    def _memory_kind(self, memory: Any) -> MemoryKind:
        """Return the GPU's memory kind, determined once per GPU."""
        if self._memory is None or self._memory.name != self._identity.get("name"):
            self._memory = MemoryKind.of(self._nvml, self._handle, self._identity.get("name"), memory)
        return self._memory

    def _energy(self) -> int | None:
        """Return the energy counter in mJ on every `ENERGY_EVERY`th call, and None on all other calls.

        The counter is cumulative, so no energy is missed between reads.
        """
        self._n_listed += 1
        return self._get("energy_j", ENERGY) if self._n_listed % ENERGY_EVERY == 1 else None

    def _look_up(self) -> Any:
        """Return a new handle for the GPU; raise `_GpuFault` if the GPU cannot be read."""
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(self.index)
        except self._nvml.NVMLError as error:
            raise _GpuFault(error.value) from None

    def _once(self, field: str, variants: Variants) -> Any:
        """Return a rarely changing field; cache it after a read that succeeds or shows that it is unsupported."""
        if field not in self._static:
            answer = self._get(field, variants)
            if field in self._failed:
                return None
            self._static[field] = answer
        return self._static[field]

    def _get(self, field: str, variants: Variants) -> Any:
        """Return the result of the first function in `variants` supported by this driver.

        Return None if the driver supports none of the variants, or if the call fails.
        """
        for position in range(self._variant.get(variants, 0), len(variants)):
            self._variant[variants] = position
            function, *arguments = variants[position]
            try:
                answer = getattr(self._nvml, function)(self._handle, *arguments)
            except self._nvml.NVMLError as error:
                if error.value in faults.MISSING:
                    continue
                return self._note(field, error.value)
            except UnicodeDecodeError as error:
                answer = error.object
            except AttributeError:  # An older pynvml lacks this function.
                continue
            self._answered = True
            return answer
        return None

    def _note(self, field: str, code: int) -> None:
        if code != faults.NOT_SUPPORTED:
            self._failed[field] = faults.sensor(code)
            self._fault = code

    def _uuid(self) -> str:
        """Return the UUID or, if it is unknown, a placeholder that cannot be used to pin jobs.

        Record a missing UUID in `failed`.
        """
        uuid = text(self._identity.get("uuid"))
        if uuid is None:
            self._failed.setdefault("uuid", "not supported" if "uuid" in self._identity else "unknown")
        return uuid or f"GPU-index-{self.index}"

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the compute and graphics processes, without duplicates."""
        compute = self._get("processes", COMPUTE)
        if compute is None:
            return None
        graphics = self._get("processes", GRAPHICS) or ()
        memory: dict[int, int | None] = {}
        for process in (*compute, *graphics):
            if 0 < process.pid <= LARGEST_PID:
                memory[process.pid] = _larger(memory.get(process.pid), process.usedGpuMemory)
        computing, drawing = ({process.pid for process in listed} for listed in (compute, graphics))
        kinds: dict[int, ProcessKind] = {
            pid: ("C+G" if pid in drawing else "C") if pid in computing else "G" for pid in memory
        }
        return tuple(process_on_gpu(pid, used, kinds[pid]) for pid, used in memory.items())


class _Slice(_NvmlGpu):
    """A GPU slice, with its own memory and processes. The driver measures all other values for the entire GPU.

    The entire GPU's errors and compute mode also determine whether the slice may be used.
    """

    def __init__(self, nvml: ModuleType, index: int, place: SliceLocation) -> None:
        super().__init__(nvml, index)
        self.gpu, self._place = place.gpu, place
        self._gpu_handle: Any = None

    def details(self, sample: GpuSample) -> GpuDetails:
        from sae_tui.gpu.details import GpuDetails

        return GpuDetails(time.time())

    def shares(self) -> Mapping[int, ProcessShares]:
        return {}

    def buffered(self) -> tuple[RingReading, ...]:
        return ()

    def _read(self, processes: bool) -> dict[str, Any]:
        # After a fault, this index may belong to another slice, so identify the slice on each read.
        self._identify(again=processes)
        self._answered, self._fault = False, None
        memory = self._get("memory_used_bytes", SLICE_MEMORY)
        if self._fault is not None and not self._answered:
            raise _GpuFault(self._fault)
        condition = self._read_condition(self._gpu_handle, whole=False) if processes else None
        return sizes(memory) | {"processes": self._processes() if processes else None, "condition": condition}

    def _look_up(self) -> Any:
        try:
            self._gpu_handle = self._nvml.nvmlDeviceGetHandleByIndex(self.gpu)
            return self._place.look_up(self._nvml)
        except self._nvml.NVMLError as error:
            raise _GpuFault(error.value) from None


def _signed(degrees: int | None) -> int | None:
    """Convert a temperature to a signed number; NVML returns temperatures below 0 as large unsigned numbers.

    A value with all bits set is not a temperature, and is returned unchanged.
    """
    is_negative = degrees is not None and 1 << 31 <= degrees < (1 << 32) - 1
    return degrees - (1 << 32) if degrees is not None and is_negative else degrees


def _larger(one: int | None, other: int | None) -> int | None:
    """Return the larger of two memory sizes, ignoring unknown sizes (None, or all bits set)."""
    sizes = [each for each in (one, other) if each is not None and each < (1 << 64) - 1]
    return max(sizes, default=None)

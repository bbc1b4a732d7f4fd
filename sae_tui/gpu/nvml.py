"""Reads NVIDIA GPUs through NVML: the only file that imports pynvml, and only in `open`, since that takes 70 ms."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Mapping
from itertools import combinations
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sae_tui.gpu import nvml_faults as faults
from sae_tui.gpu.base import GpuFacts, GpuPair, GpuProcess, GpuSample
from sae_tui.gpu.nvml_details import NvmlDetails, cuda_version, text
from sae_tui.gpu.nvml_slices import Place, slices
from sae_tui.gpu.owner import owner

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails
    from sae_tui.gpu.ring import Reading

# A card that takes longer for its four sensors is asked for no more than these.
SLOW_S = 0.1
LARGEST_PID = 1 << 22  # of Linux; drivers 535.43 to 535.86 answered ids like 4294967295
COMPUTE = (("nvmlDeviceGetComputeRunningProcesses_v3",), ("nvmlDeviceGetComputeRunningProcesses_v2",))
GRAPHICS = (("nvmlDeviceGetGraphicsRunningProcesses_v3",), ("nvmlDeviceGetGraphicsRunningProcesses_v2",))
# Version 1 counts the memory reserved by the driver, 0.1 to 1 GB, as used.
MEMORY = (("nvmlDeviceGetMemoryInfo", 0x2000028), ("nvmlDeviceGetMemoryInfo",))
# Of a slice; not every driver answers the newer call for one.
SLICE_MEMORY = (("nvmlDeviceGetMemoryInfo",),)
ENERGY_EVERY = 10
MIG_MODE = (("nvmlDeviceGetMigMode",),)
TEMPERATURE = (("nvmlDeviceGetTemperature", 0), ("nvmlDeviceGetTemperatureV", 0))
UTILIZATION = (("nvmlDeviceGetUtilizationRates",),)
POWER = (("nvmlDeviceGetPowerUsage",),)
POWER_LIMIT = (("nvmlDeviceGetEnforcedPowerLimit",), ("nvmlDeviceGetPowerManagementLimit",))
ENERGY = (("nvmlDeviceGetTotalEnergyConsumption",),)  # mJ; not supported before Volta
NAME = (("nvmlDeviceGetName",),)
UUID = (("nvmlDeviceGetUUID",),)
# NVML's codes for what lies between two cards, and for what is asked of a pair; in pynvml the first of them is a
# tuple, by mistake.
PATHS = {0: "internal", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
PEER_READ, PEER_NVLINK = 0, 2
MOST_NVLINKS = 36
Variants = tuple[tuple[Any, ...], ...]


class Nvml:
    """All NVIDIA cards of this machine, by NVML's indices, which stay the same when a card fails.

    The slices of split cards have the indices after those of the cards.
    """

    name = "nvml"
    cuda = True

    def __init__(self) -> None:
        self._nvml: Any = None
        self._cards: tuple[_Card, ...] = ()

    def open(self) -> int:
        self._nvml = _import_pynvml()
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            raise faults.source(error.value) from None
        try:
            count = int(self._nvml.nvmlDeviceGetCount())
        except self._nvml.NVMLError as error:
            self.close()
            raise faults.source(error.value) from None
        if not count:
            self.close()
            raise faults.no_gpus()
        parts = slices(self._nvml, count)
        split = {place.card for place in parts}
        cards = [_Card(self._nvml, index, has_slices=index in split) for index in range(count)]
        self._cards = (*cards, *(_Slice(self._nvml, index, place) for index, place in enumerate(parts, start=count)))
        return len(self._cards)

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        return self._cards[index].sample(processes=processes)

    def details(self, index: int, sample: GpuSample) -> GpuDetails:
        return self._cards[index].details(sample)

    def sm_percents(self, index: int, sample: GpuSample) -> Mapping[int, int]:
        return self._cards[index].sm_percents() if sample.processes else {}

    def buffered(self, index: int) -> tuple[Reading, ...]:
        return self._cards[index].buffered()

    def facts(self) -> GpuFacts:
        handles = [self._ask("nvmlDeviceGetHandleByIndex", card.card) for card in self._cards]
        whole = {card.index for card in self._cards if card.index == card.card}
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
            obstacle=faults.NO_PEER.get(peer, "the driver does not say why") if peer else "",
        )

    def _ask(self, function: str, *arguments: Any) -> Any:
        """Return NVML's answer; None for what this driver, this pynvml or this card does not tell."""
        if None in arguments:
            return None
        with contextlib.suppress(self._nvml.NVMLError, AttributeError):
            return getattr(self._nvml, function)(*arguments)
        return None

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


class _CardFault(Exception):
    """The card as a whole cannot be read; the message says why."""


class _Card:
    """One card. Constants are asked once, the handle again after each fault, so that the card can come back.

    The power limit and whether the card is split seldom change, and are asked as often as its processes are.
    """

    def __init__(self, nvml: ModuleType, index: int, *, has_slices: bool = False) -> None:
        # Its number here, and that of the card that it is or is a slice of.
        self.index = self.card = index
        self._nvml, self._has_slices = nvml, has_slices
        self._handle: Any = None
        self._static: dict[str, Any] = {}
        self._variant: dict[Variants, int] = {}
        self._failed: dict[str, str] = {}
        self._answered = False
        self._fault: int | None = None
        self._n_listed = 0
        self._details = NvmlDetails(nvml)

    def sample(self, *, processes: bool) -> GpuSample:
        self._failed = {}
        try:
            fields = self._read(processes)
        except _CardFault as fault:
            self._handle = None
            self._failed = {}
            fields = {"healthy": False, "reason": str(fault)}
        return GpuSample(
            index=self.index, uuid=self._uuid(), name=text(self._static.get("name")) or "NVIDIA GPU",
            timestamp=time.time(), failed=self._failed, **fields,
        )  # fmt: skip

    def details(self, sample: GpuSample) -> GpuDetails:
        """Return the particulars of the card; none where it cannot be read."""
        from sae_tui.gpu.details import GpuDetails

        handle = self._handle
        return GpuDetails(time.time()) if handle is None else self._details.read(handle)

    def sm_percents(self) -> Mapping[int, int]:
        """Return the share of the card that each process has; none where it cannot be read."""
        return {} if self._handle is None else self._details.sm_percents(self._handle)

    def buffered(self) -> tuple[Reading, ...]:
        """Return what the driver remembers of the card; nothing where it cannot be read."""
        from sae_tui.gpu.nvml_buffer import buffered

        return () if self._handle is None else buffered(self._nvml, self._handle)

    def _read(self, processes: bool) -> dict[str, Any]:
        """Return the fields of a healthy sample, by four calls and up to six more for what seldom changes.

        Raise `_CardFault` if the card cannot be read.
        """
        if self._handle is None:
            self._handle = self._look_up()
        if processes:
            # `nvidia-smi -pl` and `-mig` change them while the app runs.
            self._static.pop("power_limit_w", None)
            self._static.pop("mig", None)
        power_limit = self._once("power_limit_w", POWER_LIMIT)
        self._once("name", NAME)
        self._once("uuid", UUID)
        mig = self._once("mig", MIG_MODE)
        is_split = bool(mig and mig[0])
        self._answered, self._fault = False, None
        began = time.monotonic()
        utilization = self._get("utilization", UTILIZATION)
        memory = self._get("memory_used_bytes", MEMORY)
        temperature = self._get("temperature_c", TEMPERATURE)
        power = self._get("power_w", POWER)
        if self._fault is not None and not self._answered:
            raise _CardFault(faults.card(self._fault))
        is_quick = time.monotonic() - began < SLOW_S
        energy = self._energy() if processes and is_quick else None
        return {
            "utilization": None if utilization is None else utilization.gpu,
            # Memory and processes, which the driver also lists of the card, count once, for its slices.
            **_sizes(None if is_split and self._has_slices else memory),
            "temperature_c": temperature,
            "power_w": None if power is None else power / 1000,
            "power_limit_w": None if power_limit is None else power_limit / 1000,
            "energy_j": None if energy is None else energy / 1000,
            "processes": (() if is_split and self._has_slices else self._processes()) if processes else None,
            "condition": self._details.condition(self._handle) if processes and is_quick else None,
            "unusable": "" if not is_split else faults.SPLIT if self._has_slices else faults.UNCUT,
        }

    def _energy(self) -> int | None:
        """Return the counter in mJ with every `ENERGY_EVERY`th list of processes; it has all that lies in between."""
        self._n_listed += 1
        return self._get("energy_j", ENERGY) if self._n_listed % ENERGY_EVERY == 1 else None

    def _look_up(self) -> Any:
        """Return the handle of the card; raise `_CardFault`."""
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(self.index)
        except self._nvml.NVMLError as error:
            raise _CardFault(faults.card(error.value)) from None

    def _once(self, field: str, variants: Variants) -> Any:
        """Return a field that seldom changes: asked until it is answered, or known not to be supported."""
        if field not in self._static:
            answer = self._get(field, variants)
            if field in self._failed:
                return None
            self._static[field] = answer
        return self._static[field]

    def _get(self, field: str, variants: Variants) -> Any:
        """Return the answer of the first variant of a call that this driver has; None if there is none, or it fails."""
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
            except AttributeError:  # an older pynvml
                continue
            self._answered = True
            return answer
        return None

    def _note(self, field: str, code: int) -> None:
        if code != faults.NOT_SUPPORTED:
            self._failed[field] = faults.sensor(code)
            self._fault = code

    def _uuid(self) -> str:
        """Return the UUID, or a stand-in, marked in `failed`, to which no job can be pinned."""
        uuid = text(self._static.get("uuid"))
        if uuid is None:
            self._failed.setdefault("uuid", "not supported" if "uuid" in self._static else "unknown")
        return uuid or f"GPU-index-{self.index}"

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the compute and graphics processes, each once: one in both lists has the same memory in each."""
        compute = self._get("processes", COMPUTE)
        if compute is None:
            return None
        memory: dict[int, int | None] = {}
        for process in (*compute, *(self._get("processes", GRAPHICS) or ())):
            if 0 < process.pid <= LARGEST_PID:
                memory[process.pid] = _larger(memory.get(process.pid), process.usedGpuMemory)
        return tuple(GpuProcess(pid, *owner(pid), used) for pid, used in memory.items())


class _Slice(_Card):
    """A slice of a card. It has memory and processes of its own; what else a driver measures is of the whole card."""

    def __init__(self, nvml: ModuleType, index: int, place: Place) -> None:
        super().__init__(nvml, index)
        self.card, self._place = place.card, place

    def details(self, sample: GpuSample) -> GpuDetails:
        from sae_tui.gpu.details import GpuDetails

        return GpuDetails(time.time())

    def sm_percents(self) -> Mapping[int, int]:
        return {}

    def buffered(self) -> tuple[Reading, ...]:
        return ()

    def _read(self, processes: bool) -> dict[str, Any]:
        if self._handle is None:
            # Where it was gone, another may have been cut in its place.
            self._static = {}
            self._handle = self._look_up()
        self._once("name", NAME)
        self._once("uuid", UUID)
        self._answered, self._fault = False, None
        memory = self._get("memory_used_bytes", SLICE_MEMORY)
        if self._fault is not None and not self._answered:
            raise _CardFault(faults.card(self._fault))
        return _sizes(memory) | {"processes": self._processes() if processes else None}

    def _look_up(self) -> Any:
        try:
            return self._place.look_up(self._nvml)
        except self._nvml.NVMLError as error:
            raise _CardFault(faults.card(error.value)) from None


def _sizes(memory: Any) -> dict[str, int | None]:
    """Return the fields of a sample from NVML's answer; None where it tells nothing.

    A total of 0 is what some chips with unified memory answer.
    """
    is_known = memory is not None and memory.total > 0
    return {f"memory_{one}_bytes": int(getattr(memory, one)) if is_known else None for one in ("used", "free", "total")}


def _import_pynvml() -> Any:
    try:
        module = importlib.import_module("pynvml")
    except Exception as error:  # another distribution of that name fails in ways of its own
        raise faults.broken_pynvml(str(error)) from None
    if not hasattr(module, "nvmlMemory_v2"):
        raise faults.broken_pynvml("it is not the one of nvidia-ml-py")
    return module


def _larger(one: int | None, other: int | None) -> int | None:
    """Return the larger of two amounts of memory; None if both are unknown (None, or all bits set)."""
    sizes = [each for each in (one, other) if each is not None and each < (1 << 64) - 1]
    return max(sizes, default=None)

"""Reads AMD GPUs through AMD SMI. AMD SMI's Python module is loaded only when a source is opened."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from sae_tui.gpu import amd_faults as faults
from sae_tui.gpu.amd_answers import Asking, number
from sae_tui.gpu.amd_details import AmdDetails
from sae_tui.gpu.amd_module import load_amdsmi
from sae_tui.gpu.base import GpuFacts, GpuPair, GpuProcess, GpuSample
from sae_tui.gpu.owner import process_on_gpu
from trainer.contract.printable import printable

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails

# If reading a GPU's four main sensors takes longer than this, the other sensors are skipped.
SLOW_S = 0.1
ENERGY_EVERY = 10
LARGEST_PID = 1 << 22  # Linux's limit.
MIB = 1 << 20
PROCESS = "amdsmi_get_gpu_process_info"
# Power limits above this value are in microwatts, as reported by ROCm 6 and 7; smaller values are in watts.
MOST_WATTS = 100_000
# Partition modes that split a GPU, unlike SPX.
PARTITIONS = frozenset({"DPX", "TPX", "QPX", "CPX"})
_SERIAL = re.compile(r"0x[0-9a-fA-F]{1,16}")


class Amd:
    """All AMD GPUs on this machine, with the same indices as in AMD SMI, which follow PCI bus order."""

    name = "amdsmi"
    cuda = True
    # The sources in this process that have the library open. AMD SMI does not count how often it was opened, so the
    # first close call closes it for all sources.
    _users: ClassVar[set[Amd]] = set()

    def __init__(self) -> None:
        self._smi: Any = None
        self._gpus: tuple[_AmdGpu, ...] = ()

    def open(self) -> int:
        self._smi = load_amdsmi()
        self._users.add(self)
        try:
            self._smi.amdsmi_init()
            handles = self._smi.amdsmi_get_processor_handles()
        except self._smi.AmdSmiLibraryException as error:
            self.close()
            raise faults.source(error.err_code) from None
        if not handles:
            self.close()
            raise faults.no_gpus()
        self._gpus = tuple(_AmdGpu(self._smi, index, handle) for index, handle in enumerate(handles))
        return len(self._gpus)

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        return self._gpus[index].sample(processes=processes)

    def details(self, index: int, sample: GpuSample) -> GpuDetails:
        return self._gpus[index].details()

    @property
    def must_reopen(self) -> bool:
        """True if the driver was reloaded, or if its GPUs have changed since it was opened."""
        return any(gpu.is_stale for gpu in self._gpus)

    def facts(self) -> GpuFacts:
        asking = Asking(self._smi)
        drivers = [asking.ask("amdsmi_get_gpu_driver_info", gpu.handle) or {} for gpu in self._gpus]
        version = next((info["driver_version"] for info in drivers if _is_known(info.get("driver_version"))), None)
        pairs = tuple(self._pair(asking, one, other) for one, other in combinations(self._gpus, 2))
        linked = Counter(gpu for pair in pairs if pair.nvlink for gpu in (pair.first, pair.second))
        return GpuFacts(
            driver=version and printable(version),
            nvlinks=tuple(linked[gpu.index] for gpu in self._gpus),
            pairs=pairs,
            faults=faults.of_driver(),
        )

    def _pair(self, asking: Asking, one: _AmdGpu, other: _AmdGpu) -> GpuPair:
        link = asking.ask("amdsmi_topo_get_link_type", one.handle, other.handle) or {}
        reads = asking.ask("amdsmi_is_P2P_accessible", one.handle, other.handle)
        obstacle = "" if reads is not False else "the driver does not report why"
        is_xgmi = link.get("type") is not None and link["type"] == self._xgmi
        return GpuPair(one.index, other.index, nvlink=is_xgmi, peer_to_peer=reads, obstacle=obstacle)

    @property
    def _xgmi(self) -> int | None:
        """AMD SMI's code for an XGMI link. The code and the constant's name depend on the AMD SMI version."""
        for group, name in (("AmdSmiIoLinkType", "XGMI"), ("AmdSmiLinkType", "AMDSMI_LINK_TYPE_XGMI")):
            if found := getattr(getattr(self._smi, group, None), name, None):
                return int(found)
        return None

    def close(self) -> None:
        """Close the library unless another source uses it; if it must be reopened, close it for all sources."""
        self._users.discard(self)
        if self._users and not self.must_reopen:
            return
        with contextlib.suppress(self._smi.AmdSmiException):
            self._smi.amdsmi_shut_down()


class _AmdGpu:
    """One AMD GPU.

    Values that never change are cached after the first successful read. The power limit is reread with each process
    list.
    """

    def __init__(self, smi: ModuleType, index: int, handle: Any) -> None:
        self._smi = smi
        self.index = index
        self.handle = handle
        self.uuid: str | None = None
        self.name = _name(None)
        self.is_stale = False  # True if the driver must be reopened before the GPU can be read again.
        self._asking = Asking(smi)
        self._details = AmdDetails(smi, handle)
        self._asic: Mapping[str, Any] | None = None
        self._power_limit_w: float | None = None
        self._partition: str | None = None
        self._has_answered = False
        self._n_listed = 0

    def sample(self, *, processes: bool) -> GpuSample:
        self._asking.begin()
        identity = self._identify()
        fields = self._read(processes)
        failed = dict(self._asking.failed)
        if self.uuid is None:
            failed["uuid"] = "unknown" if identity is None else "not supported"
        return GpuSample(
            index=self.index, uuid=self.uuid or f"GPU-index-{self.index}", name=self.name, timestamp=time.time(),
            failed=failed, **fields,
        )  # fmt: skip

    def details(self) -> GpuDetails:
        """Return the GPU's details; fields not reported by AMD SMI are None."""
        return self._details.read()

    def _identify(self) -> Mapping[str, Any] | None:
        """Return the GPU's identity, cached after the first successful read.

        ROCm's runtimes identify a GPU by `GPU-` and the 16 digits of its serial number, not by the longer UUID shown by
        `amd-smi list`.
        """
        if self._asic is None:
            self._asic = self._asking.get("uuid", "amdsmi_get_gpu_asic_info", self.handle)
            if self._asic is not None:
                before, self.uuid, self.name = self.uuid, _uuid(self._asic), _name(self._asic)
                if self.uuid != before is not None:
                    self._details = AmdDetails(self._smi, self.handle)
        return self._asic

    def _read(self, processes: bool) -> dict[str, Any]:
        """Return a sample's fields; this takes four driver calls, plus up to seven for rarely changing values."""
        began = time.monotonic()
        busy = self._asking.get("utilization", "amdsmi_get_gpu_activity", self.handle)
        memory = self._asking.get("memory_used_bytes", "amdsmi_get_gpu_vram_usage", self.handle)
        temperature = self._details.temperature_c(self._asking)
        power = self._asking.get("power_w", "amdsmi_get_power_info", self.handle)
        if all(answer is None for answer in (busy, memory, temperature, power)):
            return self._unread()
        self._has_answered = True
        is_quick = time.monotonic() - began < SLOW_S
        used, total = (number(memory, key) for key in ("vram_used", "vram_total"))
        has_memory = used is not None and bool(total)
        return {
            "utilization": _whole(number(busy, "gfx_activity")),
            "memory_used_bytes": int(used * MIB) if has_memory and used is not None else None,
            "memory_total_bytes": int(total * MIB) if has_memory and total is not None else None,
            "temperature_c": _whole(temperature),
            "power_w": number(power, "socket_power", "current_socket_power", "average_socket_power"),
            "power_limit_w": self._power_limit(processes),
            "energy_j": self._energy() if processes and is_quick else None,
            "processes": self._processes() if processes else None,
            "condition": self._details.condition(whole=is_quick) if processes else None,
            "unusable": self._split(processes),
        }

    def _unread(self) -> dict[str, Any]:
        """Return an unreadable GPU's fields: a fault, or none if no call failed and no sensor has ever responded."""
        code = self._asking.code
        if code is None and not self._has_answered:
            return {}
        self._asking.failed = {}
        # A different GPU may respond next time, so reread the identity then.
        self._asic = None
        self.is_stale = self.is_stale or code in faults.STALE
        reason = faults.SILENT if code is None else faults.gpu(code)
        return {"healthy": False, "reason": reason, "withheld": code == faults.NO_PERMISSION}

    def _power_limit(self, again: bool) -> float | None:
        """Return the power limit in watts; if `again`, reread it because `amd-smi set --power-cap` can change it."""
        if again or self._power_limit_w is None:
            answer = self._asking.get("power_limit_w", "amdsmi_get_power_cap_info", self.handle)
            limit = number(answer, "power_cap")
            self._power_limit_w = limit / 1e6 if limit is not None and limit > MOST_WATTS else limit or None
        return self._power_limit_w

    def _split(self, again: bool) -> str:
        """Return why a partition on a split GPU cannot be used, or "" if the GPU is not split.

        If `again`, reread the partition mode because `amd-smi set -C` can change it.
        """
        if again or self._partition is None:
            self._partition = self._asking.get("unusable", "amdsmi_get_gpu_compute_partition", self.handle) or ""
            self._asking.failed.pop("unusable", None)
        return faults.SPLIT % self._partition if self._partition in PARTITIONS else ""

    def _energy(self) -> float | None:
        """Return the energy counter in joules on every `ENERGY_EVERY`th call, and None on all other calls.

        The counter is cumulative, so no energy is missed between reads.
        """
        self._n_listed += 1
        return self._details.energy_j() if self._n_listed % ENERGY_EVERY == 1 else None

    def _processes(self) -> tuple[GpuProcess, ...] | None:
        """Return the processes that have the GPU open, or None if they cannot be listed."""
        listed = self._asking.get("processes", "amdsmi_get_gpu_process_list", self.handle)
        if listed is None:
            return None
        found: dict[int, int | None] = {}
        for one in listed:
            # ROCm 6.0 returns a list of process handles, each requiring a separate call.
            each = one if isinstance(one, Mapping) else self._asking.ask(PROCESS, self.handle, one) or {}
            pid = int(each.get("pid", 0))
            if 0 < pid <= LARGEST_PID:
                found[pid] = _whole(number(each.get("memory_usage"), "vram_mem"))
        return tuple(process_on_gpu(pid, used) for pid, used in found.items())


def _uuid(asic: Mapping[str, Any]) -> str | None:
    serial = str(asic.get("asic_serial", ""))
    return f"GPU-{int(serial, 16):016x}" if _SERIAL.fullmatch(serial) and int(serial, 16) else None


def _name(asic: Mapping[str, Any] | None) -> str:
    """Return the product name, or a name containing the chip's id if AMD SMI does not know the product."""
    name = printable(str((asic or {}).get("market_name", "")).strip())
    if not _is_known(name):
        return "AMD GPU"
    return f"AMD GPU {name}" if name.startswith("0x") else name


def _is_known(answer: object) -> bool:
    return isinstance(answer, str) and answer not in ("", "N/A")


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)

"""Determines an NVIDIA GPU's total and used memory.

GB10 and Jetson GPUs use host memory, and on Grace chips, the host also uses the GPU's memory. The page cache in this
shared memory counts as free, because the kernel drops it when a program needs memory.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from trainer.contract.machine_memory import machine_memory

# Version 1 of this call reports the 0.1 to 1 GB reserved by the driver as used.
MEMORY = (("nvmlDeviceGetMemoryInfo", 0x2000028), ("nvmlDeviceGetMemoryInfo",))
# Slices use version 1 because not all drivers support the newer version for slices.
SLICE_MEMORY = (("nvmlDeviceGetMemoryInfo",),)
# Chips without separate GPU memory, by name and by compute capability: GB10, Jetson Xavier, Orin and Thor.
_INTEGRATED = re.compile(r"\b(GB1\d|Jetson|Tegra|Xavier|Orin|Thor|nvgpu|Spark|N1X)\b", re.IGNORECASE)
_INTEGRATED_CAPABILITIES = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0), (12, 1)})
# Chips whose GPU memory the kernel also uses as host memory: Grace Hopper and Grace Blackwell.
_COHERENT = re.compile(r"\b(GH\d{3}|GB[23]\d{2}|Grace)", re.IGNORECASE)
_NODES = Path("/sys/devices/system/node")


class MemoryKind(NamedTuple):
    """The type of a GPU's memory, and the memory's NUMA node.

    If `is_integrated`, the GPU uses host memory. If `is_coherent`, the kernel also uses the GPU's memory as host
    memory.
    """

    name: str | bytes | None = None
    is_integrated: bool = False
    is_coherent: bool = False
    node: int | None = None

    @classmethod
    def of(cls, nvml: ModuleType, handle: Any, name: str | bytes | None, memory: Any) -> MemoryKind:
        """Return a GPU's memory kind; `memory` is NVML's memory information, or None."""
        words = name.decode("utf-8", "replace") if isinstance(name, bytes) else name or ""
        if _INTEGRATED.search(words):
            return cls(name, is_integrated=True)
        if _COHERENT.search(words):
            return cls(name, is_coherent=True, node=_ask(nvml, "nvmlDeviceGetNumaNodeId", handle))
        has_none = memory is None or not memory.total
        capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle) if has_none else None
        return cls(name, is_integrated=capability in _INTEGRATED_CAPABILITIES)


OWN = MemoryKind()


def sizes(memory: Any, kind: MemoryKind = OWN) -> dict[str, Any]:
    """Return a sample's memory fields from NVML's memory information; unknown sizes are None.

    Some chips with unified memory report a total of 0.
    """
    if kind.is_integrated:
        with contextlib.suppress(OSError, KeyError, ValueError):
            free, total = machine_memory()
            return _fields(total - free, free, total) | {"is_memory_shared": True}
    if memory is None or memory.total <= 0:
        return _fields(None, None, None)
    used, free, total = (int(getattr(memory, one)) for one in ("used", "free", "total"))
    if kind.is_coherent:
        cached = min(used, _cached_bytes(kind.node))
        return _fields(used - cached, free + cached, total) | {"is_memory_shared": True}
    return _fields(used, free, total)


def _fields(used: int | None, free: int | None, total: int | None) -> dict[str, Any]:
    return {"memory_used_bytes": used, "memory_free_bytes": free, "memory_total_bytes": total}


def _cached_bytes(node: int | None) -> int:
    """Return the size in bytes of the droppable page cache on a NUMA node, or 0 if unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (_NODES / f"node{node}" / "meminfo").read_text().splitlines()
        # The file contains lines like `Node 1 FilePages:  1234 kB`.
        parts = {words[2].rstrip(":"): 1024 * int(words[3]) for words in map(str.split, lines) if len(words) > 3}
        return max(0, parts["FilePages"] - parts.get("Shmem", 0) + parts.get("SReclaimable", 0))
    return 0


def _ask(nvml: ModuleType, function: str, handle: Any) -> Any:
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        answer = getattr(nvml, function)(handle)
        return tuple(answer) if isinstance(answer, list) else answer
    return None

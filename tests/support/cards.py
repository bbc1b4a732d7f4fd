"""Simulates a CUDA machine that a test can configure."""

from __future__ import annotations

from sae_tui.gpu.base import GpuFacts, GpuSample

GIB = 1 << 30
NO_FACTS = GpuFacts()


class Cards:
    """A CUDA machine, as its driver would report it."""

    name = "nvml"
    cuda = True

    def __init__(self, count: int, facts: GpuFacts = NO_FACTS, *, memory_bytes: int = 80 * GIB) -> None:
        self.count = count
        self._facts = facts
        self._memory_bytes = memory_bytes

    def open(self) -> int:
        return self.count

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        used, total = index * GIB // 8, self._memory_bytes
        uuid, name = f"GPU-{index}", "NVIDIA H100"
        return GpuSample(index, uuid, name, 0.0, processes=(), memory_used_bytes=used, memory_total_bytes=total)

    def facts(self) -> GpuFacts:
        return self._facts

    def close(self) -> None: ...


class Box(Cards):
    """A machine with two GPUs. It is a class so that another process can import it by name."""

    def __init__(self) -> None:
        super().__init__(2)

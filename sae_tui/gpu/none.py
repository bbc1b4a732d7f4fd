"""A GPU source for machines without GPUs."""

from __future__ import annotations

from sae_tui.gpu.base import GpuFacts, GpuSample, SourceUnavailable


class NoGpus:
    """Reports no GPUs, so jobs run on the CPU."""

    name = "none"
    cuda = False

    def __init__(self, reason: str = "GPU monitoring is off", remedy: str = "jobs run on the CPU") -> None:
        self._reason = reason
        self._remedy = remedy

    def open(self) -> int:
        raise SourceUnavailable(self._reason, self._remedy)

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        raise IndexError(index)

    def facts(self) -> GpuFacts:
        return GpuFacts()

    def close(self) -> None:
        pass

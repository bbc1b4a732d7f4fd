"""A GPU source for machines with GPUs from several vendors. Each vendor's GPUs have consecutive indices."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sae_tui.gpu import AUTO, faults, vendor_to_name
from sae_tui.gpu.base import (
    OPEN_LIMIT_S,
    DriverFault,
    GpuFacts,
    GpuSample,
    GpuSource,
    ProcessShares,
    SourceUnavailable,
)
from sae_tui.gpu.detailed import DetailedSource, HurriedSource, RememberingSource, ReopeningSource, SharesSource
from sae_tui.threads import on_thread
from trainer.contract.planning.gpu_vendors import VENDORS

if TYPE_CHECKING:
    from sae_tui.gpu.details import GpuDetails
    from sae_tui.gpu.ring import RingReading


# This is shorter than the time limit for opening the entire source, so that drivers that respond can still be used.
LIMIT_S = 0.8 * OPEN_LIMIT_S


class Several:
    """Reads each vendor's GPUs through that vendor's source, and marks each sample with its vendor.

    If some drivers work and others fail, the GPUs of the failed drivers are omitted, and the facts list their faults.
    """

    name = AUTO

    def __init__(self, sources: Sequence[GpuSource]) -> None:
        self.cuda = any(source.cuda for source in sources)
        self._sources = sources
        # Each GPU's source, and its index in that source.
        self._gpus: list[tuple[GpuSource, int]] = []
        self._faults: list[SourceUnavailable] = []

    def open(self) -> int:
        gpus: list[tuple[GpuSource, int]] = []
        self._faults = []
        # Open each source on a separate thread so that a driver that never responds does not block the other drivers.
        counts = [(source, on_thread(source.open)) for source in self._sources]
        deadline = time.monotonic() + LIMIT_S
        for source, count in counts:
            try:
                gpus += [(source, number) for number in range(count.result(deadline - time.monotonic()))]
            except TimeoutError:
                self._faults.append(faults.silent(LIMIT_S, vendor_to_name(source.name).tool))
            except SourceUnavailable as error:
                self._faults.append(error)
        if not gpus:
            raise self._faults[0]
        self._gpus = gpus
        return len(gpus)

    def hurry(self) -> None:
        for source in self._sources:
            if isinstance(source, HurriedSource):
                source.hurry()

    def sample(self, index: int, *, processes: bool) -> GpuSample:
        source, number = self._gpus[index]
        return replace(source.sample(number, processes=processes), index=index, vendor=source.name)

    def vendor(self, index: int) -> str:
        return self._gpus[index][0].name

    @property
    def must_reopen(self) -> bool:
        return any(source.must_reopen for source in self._sources if isinstance(source, ReopeningSource))

    def details(self, index: int, sample: GpuSample) -> GpuDetails:
        from sae_tui.gpu.details import GpuDetails

        source, number = self._gpus[index]
        return source.details(number, sample) if isinstance(source, DetailedSource) else GpuDetails(sample.timestamp)

    def shares(self, index: int, sample: GpuSample) -> Mapping[int, ProcessShares]:
        source, number = self._gpus[index]
        return source.shares(number, sample) if isinstance(source, SharesSource) else {}

    def buffered(self, index: int) -> tuple[RingReading, ...]:
        source, number = self._gpus[index]
        return source.buffered(number) if isinstance(source, RememberingSource) else ()

    def facts(self) -> GpuFacts:
        """Return the combined facts from all vendors, with this source's GPU indices."""
        parts = [(first, source, source.facts()) for first, (source, number) in enumerate(self._gpus) if number == 0]
        cuda = next((facts.cuda for _, _, facts in parts if facts.cuda), None)
        # Missing software for one vendor is not a fault if another vendor's GPUs work.
        unread = [DriverFault(error.reason, error.remedy) for error in self._faults if error.is_broken]
        capabilities = {first + n: one for first, _, facts in parts for n, one in enumerate(facts.capabilities)}
        nvlinks = {first + n: one for first, _, facts in parts for n, one in enumerate(facts.nvlinks)}
        pairs = [
            replace(pair, first=first + pair.first, second=first + pair.second)
            for first, _, facts in parts
            for pair in facts.pairs
        ]
        return GpuFacts(
            driver=" and ".join(_version(source, facts) for _, source, facts in parts),
            cuda=cuda,
            capabilities=tuple(capabilities.get(index) for index in range(len(self._gpus))),
            nvlinks=tuple(nvlinks.get(index, 0) for index in range(len(self._gpus))),
            pairs=tuple(pairs),
            faults=(*unread, *(fault for _, _, facts in parts for fault in facts.faults)),
        )

    def close(self) -> None:
        for source in dict.fromkeys(source for source, _ in self._gpus):
            source.close()


def _version(source: GpuSource, facts: GpuFacts) -> str:
    return f"{VENDORS[source.name].words} {facts.driver or 'of unknown version'}"

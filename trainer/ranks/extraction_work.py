"""A rank's work in an extraction.

A resumed extraction continues after the last shard and keeps its history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.contract.imports import without_collection
from trainer.contract.settings.extract import ExtractJob
from trainer.ranks.environment import write_environment
from trainer.ranks.rank import RankWork, local_rank, once_each_start, rank_device

if TYPE_CHECKING:
    from trainer.reporting.progress import RunProgress


class ExtractionWork(RankWork[ExtractJob]):
    """An extraction rank."""

    def run(self, progress: RunProgress) -> bool:
        with without_collection():
            from trainer.ranks.extraction_rank import PEERS, extract_rows

        if self.rank == 0:
            write_environment(self.attempt / "environment.json")
        device, folder = rank_device(self.spec, local_rank()), self.attempt / once_each_start(self.spec, PEERS)
        return extract_rows(self.job, self.rank, self.spec.n_processes, device, folder, progress, self.stop)

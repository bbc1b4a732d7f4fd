"""Reads a run's live state from its `metrics.db`: the heartbeat and the latest values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from trainer.contract.paths import RunPaths
from trainer.contract.runs.how_far import OVERFITTING, RESUMED
from trainer.contract.store.database import StoreError
from trainer.contract.store.follower import StoreFollower
from trainer.contract.store.metrics_store import Heartbeat, SeriesReader, best_sae, value_of_sae
from trainer.contract.store.rows import VALUE_COLUMNS, fitting
from trainer.contract.store.seeds import Seeds, seeds_in


class LiveRun:
    """Follows a run's metrics; there are no values before the first row is written."""

    def __init__(self, paths: RunPaths) -> None:
        self._follower = StoreFollower(paths.metrics_db, SeriesReader)
        self.heartbeat: Heartbeat | None = None
        self.latest: dict[str, float] = {}
        # The warning that the run is overfitting, or None if there is none. A warning from before the latest resume
        # does not count.
        self.overfitting: str | None = None

    def poll(self) -> bool:
        """Read new data and return whether there was any; without new data, this takes one `stat` call and 6 µs."""
        # If the file is locked or damaged, the next poll retries.
        with contextlib.suppress(StoreError):
            return self._follower.poll(self._read) and self.heartbeat is not None
        return False

    @property
    def reader(self) -> SeriesReader | None:
        """The store's reader, or None if the store is not open."""
        return self._follower.store

    @property
    def best_sae(self) -> str:
        """The SAE in a sweep whose values represent the run, or "" for a run with a single SAE."""
        return best_sae(self.latest)

    @property
    def seeds(self) -> Seeds | None:
        """The SAEs that differ from `best_sae` only in the seed, with their values' spread, or None if none do."""
        return seeds_in(self.latest, self.best_sae)

    def fields(self) -> dict[str, Any]:
        """Return the job row columns updated by the run, with the values for the best SAE in a sweep."""
        fields: dict[str, Any] = self.values(VALUE_COLUMNS)
        if "memory_bytes" in self.latest:
            fields["peak_memory_bytes"] = int(self.latest["memory_bytes"])
        if self.heartbeat:
            heartbeat = self.heartbeat
            fields |= {"step": heartbeat.step, "total_steps": heartbeat.total_steps or None, "tokens": heartbeat.tokens}
            fields["overfitting"] = self.overfitting
        # Drop invalid values so that a damaged file cannot make the job list unreadable.
        return fitting(fields)

    def values(self, names: Iterable[str]) -> dict[str, float]:
        """Return a dict mapping these series to their latest values; for a sweep, these are the best SAE's values."""
        best = self.best_sae
        newest = {name: value_of_sae(self.latest, name, best) for name in names}
        return {name: value for name, value in newest.items() if value is not None}

    def close(self) -> None:
        self._follower.close()

    def _read(self, reader: SeriesReader | None) -> None:
        # If the file is gone, keep the last values.
        if reader:
            self.heartbeat, self.latest = reader.heartbeat(), reader.latest()
            newest = reader.newest_event((OVERFITTING, RESUMED))
            self.overfitting = newest.message if newest and newest.kind == OVERFITTING else None

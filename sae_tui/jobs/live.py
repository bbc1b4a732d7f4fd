"""What a run reports of itself while it runs: heartbeat and newest values from its `metrics.db`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from trainer.contract.paths import RunPaths
from trainer.contract.runs.how_far import OVERFITTING, RESUMED
from trainer.contract.store.database import StoreError
from trainer.contract.store.follower import Follower
from trainer.contract.store.metrics_store import Heartbeat, SeriesReader, best_sae, value_of_sae
from trainer.contract.store.rows import VALUE_COLUMNS, fitting


class LiveRun:
    """Follows the metrics of one run; before the first row there is simply nothing."""

    def __init__(self, paths: RunPaths) -> None:
        self._follower = Follower(paths.metrics_db, SeriesReader)
        self.heartbeat: Heartbeat | None = None
        self.latest: dict[str, float] = {}
        # How the run overfitted, in words; None if it did not, or if it was resumed since then.
        self.overfitting: str | None = None

    def poll(self) -> bool:
        """Read what is new and tell whether there was anything; costs a stat and 6 µs where there is nothing."""
        # Locked or damaged: the next poll looks again.
        with contextlib.suppress(StoreError):
            return self._follower.poll(self._read) and self.heartbeat is not None
        return False

    @property
    def reader(self) -> SeriesReader | None:
        """The open file, where there is one."""
        return self._follower.store

    @property
    def best_sae(self) -> str:
        """The SAE of a sweep that the run is judged by; "" for a run of one."""
        return best_sae(self.latest)

    def fields(self) -> dict[str, Any]:
        """Return the columns of the job's row that the run knows better; for a sweep, the values of its best SAE."""
        fields: dict[str, Any] = self.values(VALUE_COLUMNS)
        if "memory_bytes" in self.latest:
            fields["peak_memory_bytes"] = int(self.latest["memory_bytes"])
        if self.heartbeat:
            beat = self.heartbeat
            fields |= {"step": beat.step, "total_steps": beat.total_steps or None, "tokens": beat.tokens}
            fields["overfitting"] = self.overfitting
        # Values from a damaged file must not make the list of jobs unreadable.
        return fitting(fields)

    def values(self, names: Iterable[str]) -> dict[str, float]:
        """Return the newest values of those of these series that have one; for a sweep, those of its best SAE."""
        best = self.best_sae
        newest = {name: value_of_sae(self.latest, name, best) for name in names}
        return {name: value for name, value in newest.items() if value is not None}

    def close(self) -> None:
        self._follower.close()

    def _read(self, reader: SeriesReader | None) -> None:
        # What was last seen stays where the file has gone.
        if reader:
            self.heartbeat, self.latest = reader.heartbeat(), reader.latest()
            newest = reader.newest_event((OVERFITTING, RESUMED))
            self.overfitting = newest.message if newest and newest.kind == OVERFITTING else None

"""What a run reports of itself while it runs: heartbeat and newest values from its `metrics.db`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from trainer.contract.paths import RunPaths
from trainer.contract.store.database import StoreError
from trainer.contract.store.metrics_store import Heartbeat, SeriesReader, best_sae, value_of_sae
from trainer.contract.store.rows import VALUE_COLUMNS, fitting


class LiveRun:
    """Follows the metrics of one run; before the first row there is simply nothing."""

    def __init__(self, paths: RunPaths) -> None:
        self._path = paths.metrics_db
        self._inode: int | None = None
        self._version: int | None = None
        self.reader: SeriesReader | None = None
        self.heartbeat: Heartbeat | None = None
        self.latest: dict[str, float] = {}

    def poll(self) -> bool:
        """Read what is new and tell whether there was anything; costs a stat and 6 µs where there is nothing."""
        try:
            if not self._open():
                return False
            assert self.reader is not None
            version = self.reader.version()
            if version == self._version:
                return False
            self.heartbeat = self.reader.heartbeat()
            self.latest = self.reader.latest()
            self._version = version
            return self.heartbeat is not None
        except StoreError:
            # Being created just now, or locked: the next poll sees it.
            return False

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
        # Values from a damaged file must not make the list of jobs unreadable.
        return fitting(fields)

    def values(self, names: Iterable[str]) -> dict[str, float]:
        """Return the newest values of those of these series that have one; for a sweep, those of its best SAE."""
        best = self.best_sae
        newest = {name: value_of_sae(self.latest, name, best) for name in names}
        return {name: value for name, value in newest.items() if value is not None}

    def close(self) -> None:
        if self.reader:
            self.reader.close()
            self.reader = None

    def _open(self) -> bool:
        """Open the file, and anew where it was replaced, since the old one never changes; return False without one."""
        try:
            inode = os.stat(self._path).st_ino
        except OSError:
            self.close()
            return False
        if self.reader is None or inode != self._inode:
            self.close()
            self.reader = SeriesReader(self._path)
            self._inode, self._version = inode, None
        return True

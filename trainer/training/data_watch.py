"""Detects changes to a run's shards while the run is reading them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.contract.object_paths import url_of
from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.runs.data_record import DataRecord, FolderRecord, ShardRecord, change_of, cut_sentence, sampled
from trainer.reporting.report import Report

_LEFT = "the run continues with the file that it has open, but can be resumed only if you restore that file"
_CURE = "restore it and resume, or start a new run"


class DataWatch:
    """Compares the shards with their state at the start of the run; only rank 0 passes a record.

    A shard that was replaced or removed is still open with its old content. If a shard was modified in place, the run
    no longer trains on the recorded rows, and `fault` contains the error message.
    """

    def __init__(self, record: DataRecord) -> None:
        self._began_with = record
        # Sample the shards in a thread during the first steps, since this reads up to 256 MiB.
        reader = ThreadPoolExecutor(1, "data-record")
        self._sampled = reader.submit(sampled, record)
        reader.shutdown(wait=False)
        # The last known size and modification time of each changed file; None if the file was removed.
        self._seen: dict[Path, tuple[int, int] | None] = {}
        self._sound_at = Position(0, 0)
        self.fault: str | None = None

    def record(self) -> DataRecord:
        """Return the state of the shards at the start of the run, for a checkpoint."""
        return self._sampled.result()

    def look(self, at: Position, report: Report) -> None:
        """Check all shards, and report each change once."""
        for folder, shard in self._changed():
            if why := change_of(folder, shard):
                self._judge(folder, shard, why, report)
        if not self.fault:
            self._sound_at = at

    def _changed(self) -> Iterator[tuple[FolderRecord, ShardRecord]]:
        """Yield the shards whose size or modification time has changed since the last check."""
        for number, folder in enumerate(self._began_with):
            for place, shard in enumerate(folder.shards):
                file = folder.file(shard)
                if url_of(file):
                    continue  # downloads check the object's version
                status = _status(file)
                stamp = (status.st_size, status.st_mtime_ns) if status else None
                if stamp != self._seen.get(file, (shard.size, shard.mtime_ns)):
                    self._seen[file] = stamp
                    yield folder, self.record()[number].shards[place]

    def _judge(self, folder: FolderRecord, shard: ShardRecord, why: str, report: Report) -> None:
        file = folder.file(shard)
        status = _status(file)
        is_open_as_it_was = status is None or status.st_ino != shard.inode or file.suffix == ".parquet"
        if is_open_as_it_was:
            report.warn("data", f"{file} has changed since the run began: it {why}; {_LEFT}")
            return
        if status is not None and status.st_size < shard.size:
            self.fault = f"{folder.field}: {cut_sentence(file, status.st_size, shard.size)}"
        else:
            since = f"steps after {self._sound_at.step} may have used the changed rows"
            self.fault = (
                f"{folder.field}: {file} was modified while the run was reading it: it {why}, and {since}; {_CURE}"
            )
        report.warn("data", self.fault)


def _status(file: Path) -> os.stat_result | None:
    try:
        return file.stat()
    except OSError:
        return None

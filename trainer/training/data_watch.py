"""Finds out whether the shards of a run change while it reads them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.contract.runs.checkpoint_manifest import Position
from trainer.contract.runs.data_record import DataRecord, FolderRecord, ShardRecord, change_of, cut_sentence, sampled
from trainer.reporting.report import Report

_LEFT = "the run goes on with the file that it has open, but can be resumed only with that one in its place"
_CURE = "put it back as it was and resume, or start a new run"


class DataWatch:
    """Compares the shards with what they were when the run began; only rank 0 has one with a record.

    A shard that was replaced or removed is still open and read as it was. One that was written to is no longer what the
    run is trained on, which `fault` then says.
    """

    def __init__(self, record: DataRecord) -> None:
        self._began_with = record
        # Beside the first steps, since it reads up to 256 MiB.
        reader = ThreadPoolExecutor(1, "data-record")
        self._sampled = reader.submit(sampled, record)
        reader.shutdown(wait=False)
        # Size and time of each changed file as it was last looked at.
        self._seen: dict[Path, tuple[int, int] | None] = {}
        self._sound_at = Position(0, 0)
        self.fault: str | None = None

    def record(self) -> DataRecord:
        """Return the shards as they were when the run began, for a checkpoint."""
        return self._sampled.result()

    def look(self, at: Position, report: Report) -> None:
        """Look at all shards again, and report each that has changed, once."""
        for folder, shard in self._changed():
            if why := change_of(folder, shard):
                self._judge(folder, shard, why, report)
        if not self.fault:
            self._sound_at = at

    def _changed(self) -> Iterator[tuple[FolderRecord, ShardRecord]]:
        """Yield the shards whose size or time is another than when they were last looked at."""
        for number, folder in enumerate(self._began_with):
            for place, shard in enumerate(folder.shards):
                file = folder.file(shard)
                if (stamp := _stamp(file)) != self._seen.get(file, (shard.size, shard.mtime_ns)):
                    self._seen[file] = stamp
                    yield folder, self.record()[number].shards[place]

    def _judge(self, folder: FolderRecord, shard: ShardRecord, why: str, report: Report) -> None:
        file = folder.file(shard)
        status = file.stat() if file.exists() else None
        is_open_as_it_was = status is None or status.st_ino != shard.inode or file.suffix == ".parquet"
        if is_open_as_it_was:
            report.warn("data", f"{file} has changed since the run began: it {why}; {_LEFT}")
            return
        if status is not None and status.st_size < shard.size:
            self.fault = f"{folder.field}: {cut_sentence(file, status.st_size, shard.size)}"
        else:
            since = f"steps after {self._sound_at.step} may have learnt from it"
            self.fault = f"{folder.field}: {file} was written to while the run reads it: it {why}, and {since}; {_CURE}"
        report.warn("data", self.fault)


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns

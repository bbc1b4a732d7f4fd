"""Copies progress from the file written by rank 0 on another host into `metrics.db`.

No other process writes to this `metrics.db`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from trainer.contract.files import open_plain, write_whole
from trainer.contract.store.database import StoreError, explain_errors, file_identity
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesReader, SeriesWriter
from trainer.contract.store.progress_line import ProgressLine, decode
from trainer.contract.store.rows import Event

MOST_BYTES = 4 * 2**20


class Ingest:
    """Copies progress lines into a store; saves the read position for a restarted supervisor."""

    def __init__(self, progress_file: Path, metrics_db: Path) -> None:
        self._file, self._db = progress_file, metrics_db
        self._offset_file = progress_file.with_suffix(".offset")
        self._offset = _read_offset(self._offset_file)
        self._writer: SeriesWriter | None = None
        self._identity: tuple[int, int] | None = None
        self._known: set[Event] = set()

    def poll(self) -> bool:
        """Store up to 4 MiB of complete lines added since the last call; return whether there were any.

        Raise `StoreError` if the store cannot be written to; the next call then stores the same lines.
        """
        self._leave_lost_store()
        chunk = self._read()
        whole = chunk[: chunk.rfind(b"\n") + 1]
        if not whole and len(chunk) < MOST_BYTES:
            return False
        # The trainer never writes a line this long; the pieces of a longer line cannot be decoded, so they are skipped.
        whole = whole or chunk
        try:
            self._store([line for text in whole.splitlines() if (line := decode(text))])
        except StoreError:
            self.close()
            raise
        self._offset += len(whole)
        with contextlib.suppress(OSError):
            # If the position is lost, all lines are reread, but no line is stored twice.
            write_whole(self._offset_file, str(self._offset), durable=False)
        return True

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer:
            writer.close()

    def _leave_lost_store(self) -> None:
        """Start over from the first line if the store was deleted or replaced; the file still contains all lines."""
        with explain_errors(self._db):
            if self._writer and file_identity(self._db) != self._identity:
                self.close()
                self._offset = 0

    def _read(self) -> bytes:
        """Read new data. A network file system checks for new data only on opening, so open the file each time."""
        try:
            with open_plain(self._file) as stream:
                stream.seek(self._offset)
                return stream.read(MOST_BYTES)
        except OSError:
            return b""

    def _store(self, lines: list[ProgressLine]) -> None:
        """Store the lines in as few writes as possible; before the history is rewound, write the earlier lines."""
        writer = self._open()
        rows: list[MetricRow] = []
        events: list[Event] = []
        heartbeat: Heartbeat | None = None
        for line in lines:
            if line.rewind:
                writer.write(rows, heartbeat, events)
                writer.rewind(line.rewind)
                rows, events, heartbeat = [], [], None
            rows += line.series_rows
            events += [event for event in line.events if event not in self._known]
            heartbeat = line.heartbeat or heartbeat
        writer.write(rows, heartbeat, events)
        self._known = set()

    def _open(self) -> SeriesWriter:
        """Open the store and read its events so that no event is stored twice.

        Metric rows overwrite earlier copies.
        """
        if self._writer is None:
            self._writer = SeriesWriter(self._db)
            self._identity = file_identity(self._db)
            with contextlib.closing(SeriesReader(self._db)) as reader:
                self._known = set(reader.events())
        return self._writer


def _read_offset(file: Path) -> int:
    try:
        with open_plain(file) as stream:
            offset = int(stream.read(20))
    except (OSError, ValueError):
        return 0
    return offset if 0 <= offset < 2**63 else 0

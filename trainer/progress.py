"""What a run tells the outside, and what the outside asks of it: one thread on rank 0.

Training hands over immutable rows and goes on; a store that is locked, full or gone costs rows, never a step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from trainer.contract.control import Control, Event
from trainer.contract.problems import UserError
from trainer.contract.series import Heartbeat, Row, SeriesWriter

FLUSH_S = 0.5


class Requests:
    """What is asked of a launched job, read from the control store without ever writing to it."""

    def __init__(self, control_db: Path, job_id: int) -> None:
        self._path, self._job_id = control_db, job_id
        self._control: Control | None = None

    def stop_wanted(self) -> bool:
        """Whether somebody asked the job to stop or pause; False where the store cannot be read now."""
        try:
            self._control = self._control or Control(self._path, readonly=True)
            return not {"stop", "pause"}.isdisjoint(self._control.requested(self._job_id))
        except UserError:
            self._control = None
            return False


class Progress:
    """The null form, for every rank but 0: it only remembers where the run is."""

    def __init__(self) -> None:
        self.place = ("starting", 0)

    def rows(self, rows: Iterable[Row]) -> None:
        """Hands over values of metrics."""

    def beat(self, phase: str, step: int, tokens: int) -> None:
        """Says where the run is; called at every step, so it costs next to nothing."""
        self.place = (phase, step)

    def event(self, kind: str, message: str, level: str = "info") -> None:
        """Hands over something worth a line in the job's history."""

    def close(self) -> None:
        """Writes what is left; takes 5 s at most."""


class StoredProgress(Progress):
    """Writes to `metrics.db` every half second, and looks for a stop request as often."""

    def __init__(self, metrics_db: Path, total_steps: int, stop: threading.Event, requests: Requests | None) -> None:
        super().__init__()
        self._path = metrics_db
        self._total_steps = total_steps
        self._stop, self._requests = stop, requests
        self._waiting: queue.SimpleQueue[Row | Event] = queue.SimpleQueue()
        self._heartbeat: Heartbeat | None = None
        self._written: Heartbeat | None = None
        self._writer: SeriesWriter | None = None
        self._dropped = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def rows(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._waiting.put(row)

    def beat(self, phase: str, step: int, tokens: int) -> None:
        super().beat(phase, step, tokens)
        self._heartbeat = Heartbeat(phase, step, self._total_steps, tokens, time.time())

    def event(self, kind: str, message: str, level: str = "info") -> None:
        self._waiting.put(Event(timestamp=time.time(), level=level, kind=kind, message=message))

    def close(self) -> None:
        self._closed.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed.wait(FLUSH_S):
            self._tick()
        self._tick()
        self._close_writer()

    def _tick(self) -> None:
        # Nothing here may reach the training.
        with contextlib.suppress(Exception):
            if self._requests and self._requests.stop_wanted():
                self._stop.set()
        handed_over = list(self._drain())
        try:
            self._write(handed_over)
        except Exception:
            # A new connection also finds a store that was replaced.
            self._dropped += len(handed_over)
            self._written = None
            self._close_writer()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        with contextlib.suppress(Exception):
            if writer:
                writer.close()

    def _drain(self) -> Iterator[Row | Event]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._waiting.get_nowait()

    def _write(self, handed_over: list[Row | Event]) -> None:
        heartbeat = self._heartbeat
        if not handed_over and heartbeat is self._written:
            return
        self._writer = self._writer or SeriesWriter(self._path)
        rows = [item for item in handed_over if isinstance(item, Row)]
        events = [item for item in handed_over if isinstance(item, Event)]
        beat = msgspec.structs.replace(heartbeat, dropped=self._dropped) if heartbeat else None
        self._writer.write(rows, beat, events)
        self._written = heartbeat

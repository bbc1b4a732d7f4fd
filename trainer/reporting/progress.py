"""Writes a run's progress to its store and reads requests to stop the run, in a thread on rank 0.

Training steps never wait for the store: they queue immutable rows and continue. While the store is locked, full or
missing, the rows stay in memory; if the queue overflows, the oldest rows are lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.store.database import StoreCorrupt
from trainer.contract.store.follower import StoreFollower
from trainer.contract.store.job_store import ENDING, Control
from trainer.contract.store.metrics_store import Heartbeat, MetricRow
from trainer.contract.store.rows import Event
from trainer.reporting.backlog import Backlog
from trainer.reporting.metrics_file import SeriesFile

FLUSH_S = 0.5
# The delay before retrying a failed write to the store, in seconds.
RETRY_S = 1.0
# The maximum time a save waits for queued rows to be stored, in seconds.
SETTLE_S = 1.0
# The maximum number of queued rows: 15 MB, or half an hour of a run that logs 50 rows per second.
MOST_ROWS = 100_000
MOST_EVENTS = 1000
# The maximum number of rows per transaction. The limit is small, so that a failed attempt costs little and other
# processes can write in between.
ROWS_AT_ONCE = 5000


class Wanted(NamedTuple):
    """The open requests for a run: to stop (or pause), and to cool down and finish early.

    `stop` identifies the latest stop request, so that another request can be detected; without a request, it is empty.
    """

    stop: frozenset[str] | tuple[int, ...] = ()
    finish: bool = False


class Requests:
    """Reads the requests for a launched job from the control store, opened read-only."""

    def __init__(self, control_db: Path, job_id: int) -> None:
        self._job_id = job_id
        self._follower = StoreFollower(control_db, lambda path: Control(path, readonly=True))
        self._wanted = Wanted()

    def wanted(self) -> Wanted:
        """Return the open requests or, if the store cannot be read, the last known ones."""
        with contextlib.suppress(UserError):
            self._follower.poll(self._read)
        return self._wanted

    def _read(self, control: Control | None) -> None:
        asked = control.open_requests(self._job_id) if control else set()
        self._wanted = Wanted(frozenset(asked & ENDING), "finish" in asked)


class RunProgress:
    """Keeps the run's phase and step in memory, without a store; used by ranks other than 0."""

    def __init__(self) -> None:
        self.place = ("starting", 0)

    def rows(self, rows: Iterable[MetricRow]) -> None:
        """Queue metric values for the store."""

    def heartbeat(self, phase: str, step: int, tokens: int) -> None:
        """Record the run's phase, step and tokens; this must be cheap, because it is called at every step."""
        self.place = (phase, step)

    def shorten(self, total_steps: int) -> None:
        """Set a new total number of steps, for a run that ends early."""

    def event(self, kind: str, message: str, level: str = "info") -> None:
        """Queue an event for the job's history."""

    def settle(self) -> None:
        """Wait until the queued rows have been stored; call this before a save.

        A resumed run does not repeat steps before the save, so without this wait, a crash could lose the rows for those
        steps.
        """

    def close(self) -> None:
        """Write the remaining reports within 5 s."""


class AnyRequests(Protocol):
    def wanted(self) -> Wanted: ...


class RowStore(Protocol):
    """A store for rows. If a call raises an exception, the same rows are written again later."""

    def write(self, rows: Iterable[MetricRow], heartbeat: Heartbeat | None, events: Iterable[Event]) -> None: ...

    def mend(self) -> str:
        """Replace a lost or corrupt file; return what happened to it, or "" if nothing did."""
        ...

    def give_up_corrupt(self) -> str: ...

    def let_go(self) -> None: ...

    def close(self) -> None: ...


class StoredProgress(RunProgress):
    """Writes to `metrics.db` or another store every half second, and polls for requests."""

    def __init__(
        self,
        store: Path | RowStore,
        total_steps: int,
        stop: threading.Event,
        requests: AnyRequests | None,
        finish: threading.Event | None = None,
        sign: Path | None = None,
    ) -> None:
        """Start the thread that writes to a store.

        If the run makes progress that cannot be stored, the thread touches the file `sign`. Otherwise, the supervisor
        would assume that the run is hanging and kill it.
        """
        super().__init__()
        self._total_steps = total_steps
        self._stop, self._finish, self._requests = stop, finish or threading.Event(), requests
        self._seen_stop = Wanted().stop
        self._rows: Backlog[MetricRow] = Backlog(MOST_ROWS)
        self._events: Backlog[Event] = Backlog(MOST_EVENTS)
        self._heartbeat: Heartbeat | None = None
        self._written: Heartbeat | None = None
        self._sign = sign
        self._signed: Heartbeat | None = None
        self._store: RowStore = SeriesFile(store) if isinstance(store, Path) else store
        self._outage: Outage | None = None
        self._dropped_reported = 0
        self._closed, self._wake = threading.Event(), threading.Event()
        self._waiting: deque[threading.Event] = deque()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def rows(self, rows: Iterable[MetricRow]) -> None:
        self._rows.add(rows)

    def heartbeat(self, phase: str, step: int, tokens: int) -> None:
        super().heartbeat(phase, step, tokens)
        self._heartbeat = Heartbeat(phase, step, self._total_steps, tokens, time.time())

    def shorten(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def event(self, kind: str, message: str, level: str = "info") -> None:
        self._events.add([Event(timestamp=time.time(), level=level, kind=kind, message=message)])

    def settle(self) -> None:
        """Write the queued rows now; wait at most `SETTLE_S`, or not at all while writes fail."""
        if self._outage:
            return
        written = threading.Event()
        self._waiting.append(written)
        self._wake.set()
        written.wait(SETTLE_S)

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            # Release only callers that were waiting before the write, because later callers may have queued more rows.
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._tick()
            for written in waiting:
                written.set()
        self._tick(is_last=True)
        with contextlib.suppress(Exception):
            self._store.close()

    def _tick(self, *, is_last: bool = False) -> None:
        # Errors here must not stop the thread.
        with contextlib.suppress(Exception):
            wanted = self._requests.wanted() if self._requests else Wanted()
            if wanted.stop and wanted.stop != self._seen_stop:
                # Set the event only once per request, because a save clears the event to detect further requests.
                self._seen_stop = wanted.stop
                self._stop.set()
            if wanted.finish:
                self._finish.set()
        if self._outage and not is_last and time.monotonic() < self._outage.retry_at:
            return
        began = time.monotonic()
        try:
            self._flush()
        except Exception as error:
            self._fail(error, began)
        if is_last and len(self._rows):
            _say(f"{len(self._rows)} rows of metrics could not be stored")

    def _flush(self) -> None:
        """Write all queued rows and events; report an outage that has just ended."""
        if lost := self._store.mend():
            self._tell_lost(lost)
        if not (self._rows or self._events or self._heartbeat is not self._written):
            return
        # Determine the number of writes in advance, because training continues to add rows.
        for _ in range(1 + len(self._rows) // ROWS_AT_ONCE):
            self._write_some()
        if self._outage:
            outage, self._outage = self._outage, None
            n_lost = self._rows.dropped - self._dropped_reported
            self._dropped_reported = self._rows.dropped
            self.event("store", outage.sentence(n_lost), "warning")
            self._write_some()

    def _write_some(self) -> None:
        rows, events = self._rows.take(ROWS_AT_ONCE), self._events.take(MOST_EVENTS)
        # Read the heartbeat after the rows, so that it is never older than the rows.
        heartbeat = self._heartbeat
        latest = msgspec.structs.replace(heartbeat, dropped=self._rows.dropped) if heartbeat else None
        try:
            self._store.write(rows, latest, events)
        except BaseException:
            self._rows.put_back(rows)
            self._events.put_back(events)
            raise
        self._written = heartbeat

    def _fail(self, error: Exception, since: float) -> None:
        with contextlib.suppress(Exception):
            if isinstance(error, StoreCorrupt):
                self._tell_lost(self._store.give_up_corrupt())
                return
        # Do not reuse a connection after a disk error.
        self._store.let_go()
        if self._outage is None:
            self._outage = Outage(error, since)
            _say(f"metrics cannot be stored and are kept in memory for now: {error}")
        self._outage.retry_at = time.monotonic() + RETRY_S
        if self._sign and self._heartbeat is not self._signed:
            self._signed = self._heartbeat
            with contextlib.suppress(OSError):
                os.utime(self._sign)

    def _tell_lost(self, what: str) -> None:
        step = self._written.step if self._written else 0
        self._written = None
        message = f"{what}; a new file was created, without the curves and events up to step {step}"
        self.event("store", message, "warning")
        _say(message)


class Outage:
    """A period during which writes to the store failed."""

    def __init__(self, error: Exception, since: float) -> None:
        self.retry_at = 0.0
        self._error, self._since = error, since

    def sentence(self, lost: int) -> str:
        """Return a message about this outage once it has ended; `lost` is the number of dropped rows."""
        what = f"{lost:,} rows were lost" if lost else "no rows were lost"
        return f"metrics could not be stored for {time.monotonic() - self._since:.0f} s; {what} ({self._error})"


def _say(line: str) -> None:
    # Import late: `rank_log` imports torch, which is still being loaded when this thread starts.
    from trainer.reporting import rank_log

    rank_log.say(line)

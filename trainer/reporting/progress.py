"""Reports a run to its store, and reads requests to stop: by one thread on rank 0.

Training hands over immutable rows and goes on. While the store is locked, full or gone they wait here; rows beyond the
room are lost, but never a step.
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
from trainer.contract.store.follower import Follower
from trainer.contract.store.job_store import ENDING, Control
from trainer.contract.store.metrics_store import Heartbeat, Row
from trainer.contract.store.rows import Event
from trainer.reporting.backlog import Backlog
from trainer.reporting.metrics_file import SeriesFile

FLUSH_S = 0.5
# A store that could not be used is tried again so much later.
RETRY_S = 1.0
# The longest that a save waits for its rows to be stored.
SETTLE_S = 1.0
# 15 MB: half an hour of a run that logs 50 rows a second.
MOST_ROWS = 100_000
MOST_EVENTS = 1000
# In one transaction, so that an attempt in vain costs little and others get their turn.
ROWS_AT_ONCE = 5000


class Wanted(NamedTuple):
    """What a run is asked for: to stop (or pause), and to cool down and finish early.

    `stop` identifies the newest request to stop, so that another one is seen; it is empty where there is none.
    """

    stop: frozenset[str] | tuple[int, ...] = ()
    finish: bool = False


class Requests:
    """Requests to a launched job, read from the control store without ever writing to it."""

    def __init__(self, control_db: Path, job_id: int) -> None:
        self._job_id = job_id
        self._follower = Follower(control_db, lambda path: Control(path, readonly=True))
        self._wanted = Wanted()

    def wanted(self) -> Wanted:
        """Return what the job is asked for; as last known where the store cannot be read now."""
        with contextlib.suppress(UserError):
            self._follower.poll(self._read)
        return self._wanted

    def _read(self, control: Control | None) -> None:
        asked = control.open_requests(self._job_id) if control else set()
        self._wanted = Wanted(frozenset(asked & ENDING), "finish" in asked)


class Progress:
    """Progress of every rank but 0: it only remembers where the run is."""

    def __init__(self) -> None:
        self.place = ("starting", 0)

    def rows(self, rows: Iterable[Row]) -> None:
        """Hand over values of metrics."""

    def beat(self, phase: str, step: int, tokens: int) -> None:
        """Record where the run is; called at every step, so it costs next to nothing."""
        self.place = (phase, step)

    def shorten(self, total_steps: int) -> None:
        """Set the number of steps after which the run now ends."""

    def event(self, kind: str, message: str, level: str = "info") -> None:
        """Hand over an event for the job's history."""

    def settle(self) -> None:
        """Wait before a save until rows are stored.

        Those of steps that are never trained again would otherwise be lost with the process.
        """

    def close(self) -> None:
        """Write what is left; take 5 s at most."""


class AnyRequests(Protocol):
    def wanted(self) -> Wanted: ...


class Store(Protocol):
    """A store of rows; any call may raise, and the same rows then come again."""

    def write(self, rows: Iterable[Row], heartbeat: Heartbeat | None, events: Iterable[Event]) -> None: ...

    def mend(self) -> str:
        """Return what happened to the file that was there before, if it was lost; else ""."""
        ...

    def give_up_corrupt(self) -> str: ...

    def let_go(self) -> None: ...

    def close(self) -> None: ...


class StoredProgress(Progress):
    """Writes every half second to `metrics.db`, or to another store, and looks for requests."""

    def __init__(
        self,
        store: Path | Store,
        total_steps: int,
        stop: threading.Event,
        requests: AnyRequests | None,
        finish: threading.Event | None = None,
        sign: Path | None = None,
    ) -> None:
        """Begin to report to a store; `sign` is a file to touch if steps are made but cannot be stored.

        Without a sign, the supervisor would take the run for one that hangs, and end it.
        """
        super().__init__()
        self._total_steps = total_steps
        self._stop, self._finish, self._requests = stop, finish or threading.Event(), requests
        self._seen_stop = Wanted().stop
        self._rows: Backlog[Row] = Backlog(MOST_ROWS)
        self._events: Backlog[Event] = Backlog(MOST_EVENTS)
        self._heartbeat: Heartbeat | None = None
        self._written: Heartbeat | None = None
        self._sign = sign
        self._signed: Heartbeat | None = None
        self._store: Store = SeriesFile(store) if isinstance(store, Path) else store
        self._outage: Outage | None = None
        self._dropped_told = 0
        self._closed, self._wake = threading.Event(), threading.Event()
        self._waiting: deque[threading.Event] = deque()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def rows(self, rows: Iterable[Row]) -> None:
        self._rows.add(rows)

    def beat(self, phase: str, step: int, tokens: int) -> None:
        super().beat(phase, step, tokens)
        self._heartbeat = Heartbeat(phase, step, self._total_steps, tokens, time.time())

    def shorten(self, total_steps: int) -> None:
        self._total_steps = total_steps

    def event(self, kind: str, message: str, level: str = "info") -> None:
        self._events.add([Event(timestamp=time.time(), level=level, kind=kind, message=message)])

    def settle(self) -> None:
        """Have what was handed over written now; wait `SETTLE_S` at most, and not at all while the store fails."""
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
            # Only those that wait now: one that comes during the write may have handed over more.
            waiting = [self._waiting.popleft() for _ in range(len(self._waiting))]
            self._tick()
            for written in waiting:
                written.set()
        self._tick(is_last=True)
        with contextlib.suppress(Exception):
            self._store.close()

    def _tick(self, *, is_last: bool = False) -> None:
        # No error here may reach the training.
        with contextlib.suppress(Exception):
            wanted = self._requests.wanted() if self._requests else Wanted()
            if wanted.stop and wanted.stop != self._seen_stop:
                # Once for each request: a run clears the event to see the next one.
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
        """Write everything that waits, and report an outage that has just ended."""
        if lost := self._store.mend():
            self._tell_lost(lost)
        if not (self._rows or self._events or self._heartbeat is not self._written):
            return
        # A fixed number of times, since training hands over ever more.
        for _ in range(1 + len(self._rows) // ROWS_AT_ONCE):
            self._write_some()
        if self._outage:
            outage, self._outage = self._outage, None
            n_lost = self._rows.dropped - self._dropped_told
            self._dropped_told = self._rows.dropped
            self.event("store", outage.sentence(n_lost), "warning")
            self._write_some()

    def _write_some(self) -> None:
        rows, events = self._rows.take(ROWS_AT_ONCE), self._events.take(MOST_EVENTS)
        # Read last, so that it is never behind the rows.
        heartbeat = self._heartbeat
        beat = msgspec.structs.replace(heartbeat, dropped=self._rows.dropped) if heartbeat else None
        try:
            self._store.write(rows, beat, events)
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
        # A connection that has seen a failing disk is not trusted again.
        self._store.let_go()
        if self._outage is None:
            self._outage = Outage(error, since)
            _say(f"metrics cannot be stored and wait in memory: {error}")
        self._outage.retry_at = time.monotonic() + RETRY_S
        if self._sign and self._heartbeat is not self._signed:
            self._signed = self._heartbeat
            with contextlib.suppress(OSError):
                os.utime(self._sign)

    def _tell_lost(self, what: str) -> None:
        step = self._written.step if self._written else 0
        self._written = None
        message = f"{what}; a new one was made, without the curves and events up to step {step}"
        self.event("store", message, "warning")
        _say(message)


class Outage:
    """A time in which the store could not be written to."""

    def __init__(self, error: Exception, since: float) -> None:
        self.retry_at = 0.0
        self._error, self._since = error, since

    def sentence(self, lost: int) -> str:
        """Return a report of the outage, once it is over; `lost` is the number of rows that were dropped."""
        what = f"{lost:,} rows were lost" if lost else "no rows were lost"
        return f"metrics could not be stored for {time.monotonic() - self._since:.0f} s; {what} ({self._error})"


def _say(line: str) -> None:
    # Imported here, since it imports torch, which is loaded after this thread has started.
    from trainer.reporting import rank_log

    rank_log.say(line)

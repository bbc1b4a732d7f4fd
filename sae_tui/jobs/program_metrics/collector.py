"""Copies a running program's metrics, and its use of CPU, memory and GPUs, to the run's `metrics.db`."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.program_metrics.axis import StepAxis
from sae_tui.jobs.program_metrics.folders import MetricsFolders
from sae_tui.jobs.program_metrics.lines import Reading, read_line
from sae_tui.jobs.program_metrics.output_reader import LogPosition, OutputReader
from sae_tui.jobs.program_metrics.sources import FilePosition
from sae_tui.jobs.program_metrics.usage import ProcessUsage, gpu_usage
from sae_tui.jobs.supervisor_log import note, tolerate, tolerate_disk
from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json
from trainer.contract.paths import DataDir
from trainer.contract.printable import CONTROL
from trainer.contract.process import ProcessRef
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.command import CommandJob
from trainer.contract.settings.metrics_pattern import parse_pattern
from trainer.contract.settings.series import GPU_MEMORY, HOST_MEMORY, PEAK_MEMORY, SPEED, USAGE
from trainer.contract.store.database import StoreError, file_identity
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
from trainer.contract.store.rows import Event

# Waking up, reading a line of output, and storing its values takes 2 to 4 ms.
EVERY_S = 2.0
USAGE_EVERY_S = 5.0
# How often the read positions are stored. If this process is killed, everything read since then is reread and stored
# again at the same steps.
STATE_EVERY_S = 10.0
# The limit on series; a program that prints a new name in every line must not fill the store.
MOST_SERIES = 200
LONGEST_NAME = 80
RUNNING = "running"
# The speed is the mean over this time.
_SPEED_OVER_S = 30.0
# How long to wait for the last values when the attempt ends, because a disk may not respond.
_LAST_S = 20.0
# Series that sae-tui itself writes; a program's own series with these names get a prefix.
_OWN = frozenset({*USAGE, PEAK_MEMORY, SPEED})
_PREFIX = "program/"


class CollectorState(msgspec.Struct):
    """The state stored next to the metrics so that another supervisor or attempt continues where this one ended."""

    attempt: int = -1
    # When the attempt began, and the zero point of the usage measurements' time axis.
    began: float = 0.0
    origin: float = 0.0
    log: LogPosition = msgspec.field(default_factory=LogPosition)
    axis: StepAxis = msgspec.field(default_factory=StepAxis)
    files: dict[str, FilePosition] = {}
    # Maps each series name to the folder whose files first used it, so that two folders do not share a series.
    owners: dict[str, str] = {}
    names: list[str] = []
    told: list[str] = []
    peak_bytes: float = 0.0


class ProgramMetrics:
    """A thread that reads, every two seconds, what a program reports.

    It is separate from the supervisor's main thread because the program may write its files to a disk that does not
    respond. Its errors never affect the job.
    """

    def __init__(
        self,
        spec: RankSpec,
        config: CommandJob,
        log: Path,
        processes: Callable[[], list[ProcessRef]],
        gpu_uuids: Sequence[str] = (),
    ) -> None:
        self._processes, self._gpu_uuids = processes, gpu_uuids
        self._shares = config.launch.share
        self._data = DataDir(spec.run_dir.parents[1])
        self._db = spec.run_dir / "metrics.db"
        self._state_file = spec.run_dir / "program-metrics.json"
        self._patterns = [parse_pattern(text) for text in config.command.metrics or ()]
        self._state = state = read_json(self._state_file, CollectorState) or CollectorState()
        if state.attempt != spec.attempt:
            state.attempt, state.began, state.owners = spec.attempt, time.time(), {}
            state.axis.restart()
        state.origin = state.origin or state.began
        self._output = OutputReader(log, state.log)
        roots = (Path(config.command.folder), spec.run_dir)
        self._folders = MetricsFolders(roots, self._data.root, state.began, state.files, self._pids)
        self._usage, self._usage_at = ProcessUsage(), time.monotonic() + USAGE_EVERY_S
        self._measured = time.time()
        self._speeds: deque[tuple[float, int]] = deque()
        self._speed: float | None = None
        self._writer: SeriesWriter | None = None
        self._identity: tuple[int, int] | None = None
        self._state_at = 0.0
        self._batch = MetricBatch()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="program-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Store what the program wrote last; do nothing if the thread was not started."""
        if self._thread.ident is not None and not self._stop.is_set():
            self._stop.set()
            self._thread.join(_LAST_S)

    def _run(self) -> None:
        while True:
            is_last = self._stop.wait(EVERY_S)
            try:
                with tolerate("storing the program's metrics"), tolerate_disk("reading the program's metrics"):
                    self._turn(is_last=is_last)
            except Exception as error:
                note(f"the program's metrics cannot be read: {error!r}")
                self._stop.wait(30 * EVERY_S)
            if is_last:
                break
        if self._writer:
            self._writer.close()

    def _turn(self, *, is_last: bool) -> None:
        """Read and store new data; while earlier data cannot be stored, read nothing more."""
        if not os.path.isdir(self._db.parent):
            return
        self._store()
        for line, text in self._output.read(is_last=is_last):
            if reading := read_line(text, self._patterns):
                self._take_line(reading, line)
        for path, found in self._folders.read(is_last=is_last):
            self._take(found.values, self._place_file(found.step), f"{path.parent}/{found.group}")
        self._measure()
        self._tell_limits()
        self._finish_batch(is_last=is_last)
        self._store(is_last=is_last)

    def _pids(self) -> list[int]:
        return [process.pid for process in self._processes()]

    def _take_line(self, reading: Reading, line: int) -> None:
        axis = self._state.axis
        step = axis.place(reading, line)
        self._rewind()
        if reading.rate is not None and reading.bar == axis.bar:
            self._speed = reading.rate
        self._take(reading.values, step)

    def _place_file(self, step: int) -> int:
        placed = self._state.axis.place_file(max(0, min(step, 2**53)))
        self._rewind()
        return placed

    def _rewind(self) -> None:
        """Remove an earlier attempt's values after the step where this attempt continues."""
        axis = self._state.axis
        if axis.rewind_to is not None:
            self._batch.rewind_to, axis.rewind_to = axis.rewind_to, None
            rows, last = self._batch.rows, self._batch.rewind_to
            self._batch.rows = {key: value for key, value in rows.items() if key[0] in _OWN or key[1] <= last}
            self._speeds.clear()

    def _take(self, values: Mapping[str, float], step: int, place: str = "") -> None:
        for raw, value in values.items():
            if name := self._series_name(raw, place):
                self._batch.rows[name, step] = value

    def _series_name(self, raw: str, place: str) -> str:
        """Return a name for a series, or "" if there are too many; avoid a name that another folder already uses.

        For example, Keras writes the same names to one folder for training and to another for validation.
        """
        name = clean_name(raw)
        if place and self._state.owners.setdefault(name, place) != place:
            name = clean_name(f"{place.rpartition('/')[2] or Path(place).name}/{name}")
        if not name or name in self._state.names:
            return name
        if len(self._state.names) >= MOST_SERIES:
            self._tell("series", f"reports more than {MOST_SERIES} metrics; the others are not stored")
            return ""
        self._state.names.append(name)
        return name

    def _measure(self) -> None:
        if time.monotonic() < self._usage_at:
            return
        self._usage_at = time.monotonic() + USAGE_EVERY_S
        state, processes = self._state, self._processes()
        used = self._usage.measure(processes)
        used |= gpu_usage(self._data, socket.gethostname(), self._gpu_uuids, self._measured)
        self._measured = time.time()
        # A shared GPU's memory is also used by other jobs, so it does not count towards this job's peak.
        memory = 0.0 if self._shares else used.get(GPU_MEMORY if self._gpu_uuids else HOST_MEMORY, 0.0)
        if memory > state.peak_bytes:
            state.peak_bytes = used[PEAK_MEMORY] = memory
        for name, value in used.items():
            self._batch.rows[name, max(0, round(time.time() - state.origin))] = value

    def _tell_limits(self) -> None:
        if self._output.has_skipped:
            self._tell("skipped", "prints too much to search all of it for metrics, so some may be missing")
        for path in self._folders.damaged:
            self._tell(str(path), f"its file {path} is damaged; the metrics after the damage are not shown")
        self._folders.damaged.clear()

    def _tell(self, what: str, message: str) -> None:
        """Record an event once."""
        if what not in self._state.told:
            self._state.told.append(what)
            message = CONTROL.sub("�", message)
            self._batch.events.append(Event(timestamp=time.time(), level="warning", kind="metrics", message=message))

    def _finish_batch(self, *, is_last: bool) -> None:
        """Add the position and the speed to the batch."""
        step, total = self._state.axis.progress
        has_moved = step > 0 and (not self._speeds or self._speeds[-1][1] != step)
        if has_moved:
            self._add_speed(step)
        if has_moved or not self._batch.is_empty or (is_last and self._writer):
            self._batch.heartbeat = Heartbeat("" if is_last else RUNNING, step, total or 0, step, time.time())

    def _add_speed(self, step: int) -> None:
        """Add the speed at a step: the speed that the program states or, if it states none, the recent mean."""
        now = time.monotonic()
        if self._speeds and step < self._speeds[-1][1]:
            self._speeds.clear()
        self._speeds.append((now, step))
        while len(self._speeds) > 2 and self._speeds[1][0] < now - _SPEED_OVER_S:
            self._speeds.popleft()
        (then, first), stated = self._speeds[0], self._speed
        mean = (step - first) / (now - then) if now > then else 0.0
        if speed := stated or mean:
            self._batch.rows[SPEED, step] = speed
        self._speed = None

    def _store(self, *, is_last: bool = False) -> None:
        """Store the batch and then, if due, the read positions; raise `StoreError` if this is impossible now."""
        batch = self._batch
        if batch.is_empty:
            return
        if self._writer and file_identity(self._db) != self._identity:
            self._leave()
        try:
            if self._writer is None:
                self._writer = SeriesWriter(self._db)
                self._identity = file_identity(self._db)
            if batch.rewind_to is not None:
                self._writer.rewind(_heartbeat_at(batch.rewind_to), keep=(*USAGE, PEAK_MEMORY))
            rows = [MetricRow(name, step, value) for (name, step), value in batch.rows.items()]
            self._writer.write(rows, batch.heartbeat, batch.events)
        except StoreError:
            self._leave()
            raise
        self._batch = MetricBatch()
        if is_last or batch.events or time.monotonic() >= self._state_at:
            self._state_at = time.monotonic() + STATE_EVERY_S
            self._write_state()

    def _write_state(self) -> None:
        with contextlib.suppress(OSError):
            write_whole(self._state_file, msgspec.json.encode(self._state), durable=False)

    def _leave(self) -> None:
        writer, self._writer = self._writer, None
        if writer:
            writer.abandon()


class MetricBatch:
    """The data to be stored next: everything since the last turn, or since the store could last be written to."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, int], float] = {}
        self.heartbeat: Heartbeat | None = None
        self.events: list[Event] = []
        self.rewind_to: int | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.rows or self.heartbeat or self.events or self.rewind_to is not None)


def _heartbeat_at(step: int) -> Heartbeat:
    return Heartbeat(RUNNING, step, 0, step, time.time())


def clean_name(name: str) -> str:
    """Return a series name that cannot be confused with sae-tui's own series or a sweep's series."""
    cleaned = CONTROL.sub("", name).strip().replace("@", "_at_")[:LONGEST_NAME]
    if cleaned.lower() == "loss":
        return "loss"
    return f"{_PREFIX}{cleaned}"[:LONGEST_NAME] if cleaned in _OWN else cleaned

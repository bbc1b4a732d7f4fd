"""Reads one job's row, curves, logs and small files as messages for an app on another host."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from sae_tui.hosts.protocol import (
    LABEL,
    LARGEST_FEATURES,
    LONGEST_LINE,
    LONGEST_TEXT,
    MOST_CURVES,
    MOST_EVENTS,
    MOST_GONE,
    MOST_RANKS,
    MOST_SAES,
    MOST_SENT_POINTS,
    PART_BYTES,
    CurvePart,
    Curves,
    FilePart,
    JobRow,
    Message,
    RunState,
    Stamp,
    UpToDate,
    fitted,
    largest_file,
    line_size,
    short_lists,
)
from trainer.contract.errors import UserError
from trainer.contract.files import open_plain
from trainer.contract.paths import DataDir
from trainer.contract.runs.explanations import EXPLANATIONS
from trainer.contract.runs.features import CARD, FEATURES
from trainer.contract.runs.latent_notes import NOTES
from trainer.contract.runs.row_sums import SUMS
from trainer.contract.store.database import StoreError
from trainer.contract.store.follower import StoreFollower
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Point, SeriesReader
from trainer.contract.store.rows import Job

# The number of points initially sent for all curves together, and the minimum and maximum number per curve. A longer
# curve is sent as means over buckets of steps, because a screen shows at most a few hundred points of a curve.
_FIRST_POINTS, _FEWEST_POINTS, _MOST_POINTS = 20_000, 100, 2000
_LOG_END, _MOST_LOGS = 64 << 10, 8
_OF_SAE = ("cfg.json", CARD, SUMS, NOTES, EXPLANATIONS)
# While latents are explained, their file changes every few seconds, and is sent as a whole. It may use up to this many
# bytes per second, an eighth of what the other side reads.
_EXPLANATIONS_BYTES_S = 32 << 10


class SentJob:
    """Follows one job and yields what has changed since the last call."""

    def __init__(self, data: DataDir, job_id: int) -> None:
        self._job_id, self._paths, self._sae = job_id, data.run(job_id), data.sae(job_id)
        self._rows = StoreFollower(data.control_db, lambda path: Control(path, readonly=True))
        self._run = StoreFollower(self._paths.metrics_db, SeriesReader)
        self._job: Job | None = None
        self._row: JobRow | None = None
        self._n_events = 0
        self._sent_run = _SentRun()
        self._sizes: dict[str, tuple[int, int]] = {}
        # The times before which changed explanations are not sent again.
        self._not_before: dict[str, float] = {}

    def messages(self) -> Iterator[Message]:
        """Yield the changes, and then `UpToDate`; raise `UserError` if the job does not exist."""
        yield from self._read_row()
        # If the store is locked or damaged, the next call reads it again.
        with contextlib.suppress(StoreError):
            yield from self._read_run()
        files, logs = dict(self._files()), dict(self._logs())
        for path, file in files.items():
            yield from self._file(path, file)
        for path, file in logs.items():
            yield from self._log(path, file)
        yield UpToDate(self._features(), self._gone(files | logs))

    def close(self) -> None:
        self._rows.close()
        self._run.close()

    def _read_row(self) -> Iterator[Message]:
        found: list[JobRow] = []
        self._rows.poll(lambda control: found.extend(self._row_of(control) if control else ()))
        if self._job is None:
            raise UserError(f"there is no job {self._job_id}; `sae-tui jobs` lists them")
        yield from found

    def _row_of(self, control: Control) -> list[JobRow]:
        """Return the row with the events that have not been sent yet, in several messages if there are many."""
        job, events = control.job(self._job_id), control.events(self._job_id)
        self._job = job
        requests = tuple(sorted(control.open_requests(self._job_id)))
        row = JobRow(short_lists(job), tuple(control.ranks(self._job_id)[-MOST_RANKS:]), requests)
        rows = [
            msgspec.structs.replace(row, first=first, events=tuple(events[first : first + MOST_EVENTS]))
            for first in range(self._n_events, len(events), MOST_EVENTS)
        ]
        if not rows and row != self._row:
            rows = [msgspec.structs.replace(row, first=len(events))]
        self._row, self._n_events = row, len(events)
        return [_fitted(row) for row in rows]

    def _read_run(self) -> list[Message]:
        """Return what the run has written since the last call; after a `StoreError`, the next call rereads it."""
        sent = self._sent_run.copy()
        found: list[Message] = []
        self._run.poll(lambda reader: found.extend(sent.news(reader) if reader else ()))
        self._sent_run = sent
        return found

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Yield the small files, each with the path used for it in messages."""
        assert self._job is not None
        number, attempt = self._job.attempt, self._paths.attempt(self._job.attempt)
        yield "run/job.toml", self._paths.job_file
        yield "run/exit.json", self._paths.exit_file
        names = ["plan.json", "data.json", *(f"rank{rank}.exit.json" for rank in range(_MOST_LOGS))]
        yield from ((f"run/attempt{number}/{name}", attempt / name) for name in names)
        for label, folder in self._saes().items():
            yield from ((_of_sae(label, name), folder / name) for name in _OF_SAE)

    def _saes(self) -> dict[str, Path]:
        """Return a dict mapping each SAE's label ("" for a single SAE) to its folder; leave out all other folders."""
        try:
            with os.scandir(self._sae) as entries:
                folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return {}
        labels = sorted(name for name in folders if re.search(LABEL, name))
        return {"": self._sae} | {name: self._sae / name for name in labels[: MOST_SAES - 1]}

    def _features(self) -> dict[str, Stamp]:
        stamps = {label: _stamp(folder / FEATURES) for label, folder in self._saes().items()}
        return {label: Stamp(*stamp) for label, stamp in stamps.items() if stamp}

    def _file(self, path: str, file: Path) -> Iterator[Message]:
        """Yield a file's content if it has changed; leave out links, and files that change while being read."""
        stamp = _stamp(file)
        if stamp is None or stamp == self._sizes.get(path) or stamp[0] > largest_file(path):
            return
        if time.monotonic() < self._not_before.get(path, 0.0):
            return
        if file.name == EXPLANATIONS:
            self._not_before[path] = time.monotonic() + stamp[0] / _EXPLANATIONS_BYTES_S
        with contextlib.suppress(OSError, ValueError, EOFError):
            with open_plain(file) as stream:
                parts = list(_parts(path, stream, stamp[0]))
            if _stamp(file) == stamp:
                self._sizes[path] = stamp
                yield from parts

    def _gone(self, files: Mapping[str, Path]) -> tuple[str, ...]:
        """Return the files that were sent but no longer exist, and forget them."""
        gone = [path for path in self._sizes if path not in files or not _stamp(files[path])]
        for path in gone[:MOST_GONE]:
            del self._sizes[path]
        return tuple(gone[:MOST_GONE])

    def _logs(self) -> Iterator[tuple[str, Path]]:
        assert self._job is not None
        ranks = range(min(self._job.world_size, _MOST_LOGS))
        names = [*(f"rank{rank}" for rank in ranks), "supervisor", "evaluation"]
        yield from ((f"run/logs/{name}.log", self._paths.logs / f"{name}.log") for name in names)

    def _log(self, path: str, file: Path) -> Iterator[Message]:
        """Yield what was appended to a log; if a lot was appended or the log is new, yield only the log's end."""
        stamp = _stamp(file)
        if stamp is None or stamp == self._sizes.get(path):
            return
        before, size = self._sizes.get(path, (0, 0))[0], stamp[0]
        continues = 0 < before <= size <= before + _LOG_END
        begin = before if continues else max(0, size - _LOG_END)
        with contextlib.suppress(OSError), open_plain(file) as stream:
            stream.seek(begin)
            data = stream.read(size - begin)
            if begin and not continues:
                data = data.partition(b"\n")[2]
            yield FilePart(path, data, offset=int(continues))
            self._sizes[path] = stamp


class _SentRun:
    """What has been sent from a run's store: the number of events, and the last step of each curve."""

    def __init__(self) -> None:
        self._n_events = 0
        self._last: dict[tuple[str, int], int] = {}
        self._restarts: tuple[int, int] | None = None

    def copy(self) -> _SentRun:
        other = _SentRun()
        other._n_events, other._last, other._restarts = self._n_events, dict(self._last), self._restarts
        return other

    def news(self, reader: SeriesReader) -> Iterator[Message]:
        """Yield what has not been sent; after the run has gone back to an earlier step, yield all curves again."""
        restarts, beat, events = reader.restarts(), reader.heartbeat(), reader.events()
        rewound = self._restarts not in (None, restarts)
        if rewound:
            self._last = {}
        for first in range(self._n_events, len(events), MOST_EVENTS):
            yield fitted(RunState(None, first, tuple(events[first : first + MOST_EVENTS])))
        self._n_events, self._restarts = len(events), restarts
        yield fitted(RunState(beat, len(events), rewound=rewound))
        yield from _packed(self._curves(reader))

    def _curves(self, reader: SeriesReader) -> Iterator[CurvePart]:
        names = reader.series()
        most = min(_MOST_POINTS, max(_FEWEST_POINTS, _FIRST_POINTS // max(1, len(names))))
        for name, rank in names:
            last = self._last.get((name, rank))
            if len(name) > LONGEST_TEXT or (last is None and len(self._last) >= MOST_CURVES):
                continue
            points = reader.history(name, rank, most=most) if last is None else reader.points(name, rank, after=last)
            for first in range(0, len(points), MOST_SENT_POINTS):
                yield _part(reader, name, rank, points[first : first + MOST_SENT_POINTS])
            if points:
                self._last[name, rank] = points[-1].step


def _fitted(row: JobRow) -> JobRow:
    """Return a row that fits in a line. Its config is sent completely or not at all, because it is read as TOML."""
    config = row.job.config if line_size(row.job.config) < LONGEST_LINE // 4 else ""
    row = fitted(_with_config(row, ""), LONGEST_LINE // 4 * 3)
    return _with_config(row, config)


def _with_config(row: JobRow, config: str) -> JobRow:
    return msgspec.structs.replace(row, job=msgspec.structs.replace(row.job, config=config))


def feature_parts(data: DataDir, job_id: int) -> Iterator[Message]:
    """Yield the feature files of a job's SAEs; raise `UserError` if one is too large or cannot be read."""
    for label, folder in SentJob(data, job_id)._saes().items():
        file = folder / FEATURES
        stamp = _stamp(file)
        if stamp is None:
            continue
        if stamp[0] > LARGEST_FEATURES:
            raise UserError(f"{file} is larger than {LARGEST_FEATURES >> 20} MiB")
        try:
            with open_plain(file) as stream:
                yield from _parts(_of_sae(label, FEATURES), stream, stamp[0])
        except (OSError, EOFError) as error:
            raise UserError(f"{file} cannot be read: {error}") from None
    yield UpToDate()


def _parts(path: str, stream: BinaryIO, size: int) -> Iterator[FilePart]:
    """Yield `size` bytes of a file in parts; raise `EOFError` if it is shorter."""
    for offset in range(0, max(1, size), PART_BYTES):
        length = min(PART_BYTES, size - offset)
        data = stream.read(length)
        if len(data) < length:
            raise EOFError("it became shorter while it was read")
        yield FilePart(path, data, offset, size)


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return a file's size and modification time, or None if there is no such file or it is a link."""
    try:
        status = os.stat(file, follow_symlinks=False)
    except OSError:
        return None
    return (status.st_size, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None


def _of_sae(label: str, name: str) -> str:
    return "/".join(filter(None, ["sae", label, name]))


def _part(reader: SeriesReader, name: str, rank: int, points: list[Point]) -> CurvePart:
    steps = tuple(point.step for point in points)
    return CurvePart(name, rank, steps, tuple(reader.timestamps(name, steps, rank)), tuple(p.value for p in points))


def _packed(parts: Iterable[CurvePart]) -> Iterator[Curves]:
    """Pack the parts of many curves into a few messages."""
    packed: list[CurvePart] = []
    n_points = n_bytes = 0
    for part in parts:
        size = line_size(part)
        if packed and (n_points + len(part.steps) > MOST_SENT_POINTS or n_bytes + size > LONGEST_LINE // 2):
            yield Curves(tuple(packed))
            packed, n_points, n_bytes = [], 0, 0
        packed.append(part)
        n_points += len(part.steps)
        n_bytes += size
    if packed:
        yield Curves(tuple(packed))

"""A copy of one job from another host, in a private folder here; a thread keeps it up to date while the job is shown.

The folder is laid out like a data folder, so that the screens for local jobs can show the copy. The other host's stores
are never opened: their rows are checked and written to new stores here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.hosts.causes import Cause, no_connection, no_message
from sae_tui.hosts.follower import FIRST_WAIT_S, LONGEST_WAIT_S, HostRefused, cut_if_silent, messages
from sae_tui.hosts.link import Allowance, Link
from sae_tui.hosts.protocol import (
    MOST_CURVES,
    Curves,
    FilePart,
    JobRow,
    Message,
    RunState,
    Stamp,
    UpToDate,
    largest_file,
    short_lists,
)
from trainer.contract.errors import UserError, sentence
from trainer.contract.locks import FileLock
from trainer.contract.paths import DataDir, free_disk, open_private, private_folder
from trainer.contract.printable import printable
from trainer.contract.process import boot_id
from trainer.contract.runs.features import FEATURES
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import MetricRow, SeriesWriter
from trainer.contract.wording import gibibytes

_PREFIX, _LOCK = "sae-tui-far-", "in-use.lock"
# No app takes this long between creating a folder and locking it.
_LOCKED_AFTER_S = 60.0
# Limits on what another host can make this host store: the total size of all files, the size of one log, and the
# numbers of files, points and events.
_MOST_BYTES, _LARGEST_LOG = 1 << 30, 4 << 20
_MOST_FILES, _MOST_POINTS, _MOST_EVENTS = 5000, 5_000_000, 100_000
# A feature file is sent only on request and may be large, so it may be read faster than unrequested messages.
_FEATURES_BYTES_S = 64 << 20
_ANOTHER_BOOT = "of-another-host"


class CopyState(msgspec.Struct, frozen=True):
    """Whether a copy is complete, when it was last up to date, and why it is not being updated.

    `sentence` gives this reason, worded to follow the host's name, or is "". `features` maps SAE labels to the stamps
    of the feature files on the other host.
    """

    is_complete: bool = False
    since: float = 0.0
    sentence: str = ""
    features: Mapping[str, Stamp] = {}


class JobCopy:
    """Follows a job on another host. `state` and `data` may be read from any thread."""

    def __init__(
        self, host: str, job_id: int, argv: Sequence[str], features: Sequence[str], on_change: Callable[[], object]
    ) -> None:
        """Create the folder; raise `OSError` or `UserError` if that is impossible. `start` does the rest in a thread.

        `argv` and `features` are the commands whose output is the job and its feature files.
        """
        self.host, self.job_id, self.state = host, job_id, CopyState()
        self.on_change = on_change
        self._argv, self._features = argv, features
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True)
        self._lock = FileLock(Path(self._folder.name) / _LOCK)
        self._lock.acquire()
        self.data = DataDir(Path(self._folder.name) / "data")
        self._files = CopiedFiles(self.data, job_id)
        self._stopped = threading.Event()
        self._links: set[Link] = set()
        self._fetched: Mapping[str, Stamp] = {}
        self._thread = threading.Thread(target=self._run, name="far-job", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop the connections and delete the copy, without waiting for the threads."""
        self._stopped.set()
        for link in tuple(self._links):
            link.stop()
        self._files.close()
        self._folder.cleanup()
        self._lock.release()

    def fetch_features(self, on_progress: Callable[[int, int], object]) -> bool:
        """Copy the feature files, unless they have not changed since the last call; raise `UserError` on failure.

        Return False if the copy was closed in the meantime. `on_progress` is called with the number of bytes received
        so far and the total number. Only one call may run at a time.
        """
        wanted, received, is_complete = self.state.features, 0, False
        if wanted == self._fetched:
            return True
        # The earlier files are out of date.
        self._fetched = {}
        self._files.delete_features()
        total = sum(stamp.bytes for stamp in wanted.values())
        place, free = free_disk(self.data.root)
        if free is not None and free < total:
            raise UserError(f"{place} has {gibibytes(free)} free, but the features of job {self.job_id} need "
                            f"{gibibytes(total)}")  # fmt: skip
        if total > self._files.free_bytes:
            raise UserError(f"the features of job {self.job_id} take up {gibibytes(total)}, but a copy of a job from "
                            f"another host has at most {gibibytes(_MOST_BYTES)}; open them on {self.host}")  # fmt: skip

        def take(message: Message) -> None:
            nonlocal received, is_complete
            is_complete = isinstance(message, UpToDate)
            if isinstance(message, FilePart) and message.path.endswith(FEATURES):
                self._files.take(message)
                received += len(message.data)
                on_progress(received, total)

        cause = self._read(self._features, take, Allowance(_FEATURES_BYTES_S, _FEATURES_BYTES_S))
        if self._stopped.is_set():
            return False
        if not is_complete:
            self._files.delete_features()
            raise UserError(f"{self.host} {cause.sentence or 'closed the connection'}; press the key again")
        self._fetched = wanted
        return True

    def _run(self) -> None:
        remove_abandoned()
        wait_s = FIRST_WAIT_S
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                self._files.begin()
            except (OSError, UserError) as error:
                cause = self._not_copied(error)
            else:
                cause = self._read(self._argv, self._take)
            if self._stopped.is_set():
                return
            self._change(sentence=cause.sentence or "closed the connection")
            wait_s = FIRST_WAIT_S if time.monotonic() - began > LONGEST_WAIT_S else wait_s
            self._stopped.wait(max(wait_s, cause.wait_s))
            wait_s = min(LONGEST_WAIT_S, 2 * wait_s)

    def _read(
        self, argv: Sequence[str], take: Callable[[Message], object], allowance: Allowance | None = None
    ) -> Cause:
        """Pass the messages from one connection to `take`, and return why the connection ended."""
        try:
            link = Link(argv, lambda: cut_if_silent(link), allowance)
        except OSError as error:
            return Cause(f"cannot be contacted: {argv[0]}: {error.strerror}; install an ssh client")
        self._links.add(link)
        try:
            for message in messages(link):
                if self._stopped.is_set():
                    link.stop()
                take(message)
        except HostRefused as refusal:
            return refusal.cause
        except ValueError as error:
            return no_message(printable(str(error)))
        except (OSError, UserError) as error:
            return self._not_copied(error)
        except Exception as error:
            # The thread must survive anything sent by the other host.
            return Cause(printable(f"cannot be followed: {error!r}"))
        finally:
            code = link.close()
            self._links.discard(link)
        is_by_itself = link.is_greeted and not link.complaints
        return Cause("") if is_by_itself else no_connection(self.host, code, link.complaints)

    def _not_copied(self, error: Exception) -> Cause:
        return Cause(f"cannot be copied to {self._folder.name}: {printable(sentence(error))}")

    def _take(self, message: Message) -> None:
        if isinstance(message, UpToDate):
            self._files.delete_gone(message.gone)
            has_news = self._files.has_news or not self.state.is_complete or self.state.sentence
            self._files.has_news = False
            self.state = CopyState(True, time.time(), "", message.features)
            if has_news:
                self.on_change()
        else:
            self._files.take(message)

    def _change(self, **fields: object) -> None:
        self.state = msgspec.structs.replace(self.state, **fields)
        self.on_change()


class CopiedFiles:
    """Writes what another host sends into a data folder; raises `ValueError` for anything no sae-tui would send."""

    def __init__(self, data: DataDir, job_id: int) -> None:
        self.has_news = False
        self._data, self._job_id = data, job_id
        self._control: Control | None = None
        self._series: SeriesWriter | None = None
        # The sizes of complete files and logs, and of the received parts of incomplete files.
        self._sizes: dict[str, int] = {}
        self._begun: dict[str, int] = {}
        self._unconfirmed: set[str] = set()  # files from earlier connections that have not been sent again
        self._curves: set[tuple[str, int]] = set()
        self._n_points = self._n_events = self._n_run_events = 0
        self._begins = self._is_closed = False
        self._one_write = threading.Lock()

    def begin(self) -> None:
        """Expect all data again for a new connection; create the folders and the store if necessary."""
        with self._one_write:
            self._begins = True
            self._delete(path for path in self._begun if not path.endswith(FEATURES))
            self._unconfirmed = {path for path in self._sizes if not path.endswith(FEATURES)}
            if self._control is None and not self._is_closed:
                self._data.create()
                self._control = Control(self._data.control_db)

    def close(self) -> None:
        """Refuse further messages, so that the folder can be deleted."""
        with self._one_write:
            self._is_closed = True
            if self._control:
                self._control.close()
            if self._series:
                self._series.abandon()

    @property
    def free_bytes(self) -> int:
        """How many more bytes of files the other host may send."""
        return _MOST_BYTES - sum(self._sizes.values()) - sum(self._begun.values())

    def delete_features(self) -> None:
        """Delete the feature files, including incomplete ones."""
        with self._one_write:
            self._delete(path for path in self._sizes | self._begun if path.endswith(FEATURES))

    def delete_gone(self, paths: Iterable[str]) -> None:
        """Once all data has been received, delete the files that no longer exist on the other host."""
        with self._one_write:
            gone = self._unconfirmed.union(paths).intersection(self._sizes)
            self._delete(gone)
            self._unconfirmed.clear()
            self.has_news |= bool(gone)

    def _delete(self, paths: Iterable[str]) -> None:
        """Delete these files and any parts of them received so far."""
        for path in tuple(paths):
            for sizes, file in ((self._sizes, self._place(path)), (self._begun, _begun(self._place(path)))):
                sizes.pop(path, None)
                file.unlink(missing_ok=True)

    def _place(self, path: str) -> Path:
        """Return where a file is stored; the protocol has already checked its path."""
        kind, *names = path.split("/")
        root = self._data.run(self._job_id).root if kind == "run" else self._data.sae(self._job_id)
        return root.joinpath(*names)

    def take(self, message: Message) -> None:
        with self._one_write:
            if self._is_closed:
                return
            self.has_news = True
            match message:
                case JobRow():
                    self._take_row(message)
                case RunState():
                    self._take_run(message)
                case Curves():
                    self._take_curves(message)
                case FilePart():
                    self._take_part(message)

    def _take_row(self, row: JobRow) -> None:
        assert self._control is not None
        if row.job.id != self._job_id or row.first > min(self._n_events, _MOST_EVENTS):
            raise ValueError("a row that was not requested")
        # With this machine's boot id, the copy counts as a local job, so its host is never reported as silent. Without
        # a process id, no process here can be mistaken for the job's supervisor.
        job = msgspec.structs.replace(
            short_lists(row.job), boot_id=boot_id(), machine_id=None, supervisor_pid=None, supervisor_start=None
        )
        ranks = [msgspec.structs.replace(one, job_id=job.id, boot_id=_ANOTHER_BOOT) for one in row.ranks]
        events = row.events[self._n_events - row.first :]
        self._control.copy(job, ranks, row.requests, events)
        self._n_events += len(events)

    def _take_run(self, run: RunState) -> None:
        if run.first > min(self._n_run_events, _MOST_EVENTS):
            raise ValueError("events that are out of order")
        if self._series is None:
            private_folder(self._data.run(self._job_id).root)
            self._series = SeriesWriter(self._data.run(self._job_id).metrics_db)
        beat, events = run.heartbeat, run.events[self._n_run_events - run.first :]
        if self._begins or run.rewound:
            # The curves that follow may have different steps, if they are means over buckets of steps.
            self._series.clear()
            self._curves.clear()
            self._begins, self._n_points = False, 0
        self._series.write([], beat, events)
        self._n_run_events += len(events)

    def _take_curves(self, curves: Curves) -> None:
        rows = [
            MetricRow(part.name, step, float("nan") if value is None else value, part.rank, at)
            for part in curves.parts
            for step, at, value in zip(part.steps, part.times, part.values, strict=True)
        ]
        self._n_points += len(rows)
        self._curves.update((part.name, part.rank) for part in curves.parts)
        if self._series is None or self._n_points > _MOST_POINTS or len(self._curves) > MOST_CURVES:
            raise ValueError("too many curves or points, or points before the run")
        self._series.write(rows)

    def _take_part(self, part: FilePart) -> None:
        sizes = self._sizes if part.total is None else self._begun
        before = sizes.get(part.path, 0) if part.offset else 0
        if part.total is None and before + len(part.data) > _LARGEST_LOG:
            before = 0
        self._check(part, before)
        if len(self._sizes | self._begun) >= _MOST_FILES or len(part.data) > self.free_bytes:
            raise ValueError("too many files, or files that are too large")
        file = self._place(part.path)
        private_folder(file.parent)
        sizes[part.path] = before + len(part.data)
        self._unconfirmed.discard(part.path)
        _append(file if part.total is None else _begun(file), part.data, overwrites=not before)
        if sizes[part.path] == part.total:
            os.replace(_begun(file), file)
            self._sizes[part.path] = self._begun.pop(part.path)

    def _check(self, part: FilePart, before: int) -> None:
        """Raise `ValueError` if a part does not follow the `before` bytes received so far, or its file is too large."""
        if part.total is None:
            return
        if part.offset != before or before + len(part.data) > part.total:
            raise ValueError("parts of a file that are out of order")
        if part.total > (largest := largest_file(part.path)) and not part.path.endswith(FEATURES):
            raise ValueError(f"a file larger than {largest >> 20} MiB")


def _begun(file: Path) -> Path:
    """Return where the parts of a file are stored until it is complete."""
    return file.with_name(f".{file.name}.part")


def _append(file: Path, data: bytes, *, overwrites: bool) -> None:
    with open(open_private(file, os.O_TRUNC if overwrites else os.O_APPEND), "wb") as stream:
        stream.write(data)


def remove_abandoned() -> None:
    """Delete the copies left behind by this user's apps that were killed."""
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            with contextlib.suppress(OSError, UserError):
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    status = os.stat(folder, follow_symlinks=False)
    is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if is_ours and time.time() - status.st_mtime > _LOCKED_AFTER_S and (lock := FileLock(folder / _LOCK)).acquire():
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()

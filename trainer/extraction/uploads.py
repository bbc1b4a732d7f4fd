"""Uploads an extraction's shards and progress to a URL in the background, and restores the progress from there.

Each shard is first written to a local staging folder, then uploaded as one object and removed. The progress on the
store counts a shard only after its object is complete, so an extraction can continue on any machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainer.contract.errors import UsageError
from trainer.contract.files import write_whole
from trainer.contract.json_file import decode_as
from trainer.contract.object_paths import is_url, joined
from trainer.contract.object_store import ObjectStore, Unreachable
from trainer.contract.paths import private_folder
from trainer.contract.runs.lock import RunLock
from trainer.contract.settings.extract import PARTS, SHARDS_IN_FLIGHT, STATE, ExtractJob
from trainer.extraction.state import ExtractionState

_FIELD = "extract.output"
_THREADS = 4
# How long an extraction waits for a store that does not answer, and the wait between two tries.
PATIENCE_S, WAIT_S = 300.0, 5.0
# The bandwidth is the mean over this time.
_RATE_OVER_S = 10.0


class UploadRate:
    """The upload bandwidth of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: deque[tuple[float, int]] = deque()
        self.n_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Count uploaded bytes."""
        with self._lock:
            self._sent.append((time.monotonic(), n_bytes))
            self.n_bytes += n_bytes

    @property
    def words(self) -> str:
        """The bandwidth over the last seconds, such as `uploading 80 MB/s`; "" if nothing was uploaded."""
        with self._lock:
            while self._sent and self._sent[0][0] < time.monotonic() - _RATE_OVER_S:
                self._sent.popleft()
            if not self.n_bytes:
                return ""
            since = self._sent[0][0] if self._sent else 0.0
            seconds = max(1.0, time.monotonic() - since)
            return f"uploading {sum(n for _, n in self._sent) / seconds / 1e6:,.1f} MB/s"


METER = UploadRate()


class _Batch(NamedTuple):
    """Files that are uploaded together, and the progress to store after them."""

    uploads: list[Future[None]]
    files: Sequence[Path]
    state_name: str
    state: bytes


class NoUploads:
    """Keeps shards where they are, in a local output folder."""

    def add(self, files: Sequence[Path], folder: Path | None = None, state: ExtractionState | None = None) -> None:
        """Upload complete shards, then the progress in `folder`, if given; wait if too many shards are in flight."""

    def drain(self) -> None:
        """Wait until everything is uploaded; raise `UserError` if an upload has failed."""

    def finish(self, files: Sequence[Path], state: ExtractionState) -> None:
        """Upload the metadata and the final progress, and remove the progress of single processes."""

    def close(self) -> None:
        """Stop uploading."""


class Uploads(NoUploads):
    """Uploads shards in the order in which they are added."""

    def __init__(self, job: ExtractJob) -> None:
        self._root, self._store = job.local_output, ObjectStore(job.extract.output, _FIELD)
        self._pool = ThreadPoolExecutor(_THREADS, "shard-upload")
        self._batches: deque[_Batch] = deque()
        self._is_closed = False

    def add(self, files: Sequence[Path], folder: Path | None = None, state: ExtractionState | None = None) -> None:
        while len(self._batches) >= SHARDS_IN_FLIGHT or (self._batches and self._is_sent(self._batches[0])):
            self._complete_first()
        uploads = [self._pool.submit(self._send, file) for file in files]
        # The caller changes the state later, so encode it now.
        encoded = msgspec.json.encode(state) if state else b""
        self._batches.append(_Batch(uploads, files, self._state_name(folder) if folder else "", encoded))

    def drain(self) -> None:
        while self._batches:
            self._complete_first()

    def finish(self, files: Sequence[Path], state: ExtractionState) -> None:
        self.drain()
        for file in files:
            self._send(file)
        self._patiently(lambda: self._store.put(msgspec.json.encode(state), STATE))
        self._store.remove(name for name in self._store.list() if name.startswith(f"{_remote(PARTS)}/"))

    def close(self) -> None:
        self._is_closed = True
        self._pool.shutdown(cancel_futures=True)

    def _complete_first(self) -> None:
        """Wait for the oldest shards, then store the progress and remove the local files."""
        batch = self._batches[0]
        wait(batch.uploads)
        for one in batch.uploads:
            one.result()
        if batch.state_name:
            self._patiently(lambda: self._store.put(batch.state, batch.state_name))
        self._batches.popleft()
        for file in batch.files:
            file.unlink(missing_ok=True)

    def _is_sent(self, batch: _Batch) -> bool:
        return all(one.done() for one in batch.uploads)

    def _send(self, file: Path) -> None:
        self._patiently(lambda: self._store.put(file, self._name(file), METER.add))

    def _patiently(self, request: Callable[[], None]) -> None:
        """Repeat a request for some minutes while the store does not answer."""
        ends = time.monotonic() + PATIENCE_S
        while True:
            try:
                return request()
            except Unreachable:
                if time.monotonic() > ends or self._is_closed:
                    raise
                time.sleep(WAIT_S)

    def _name(self, file: Path) -> str:
        return file.relative_to(self._root).as_posix()

    def _state_name(self, folder: Path) -> str:
        return _remote(self._name(folder / STATE))


def uploads_of(job: ExtractJob) -> NoUploads:
    """Return the uploads of a job, which do nothing if its output is a local folder."""
    return Uploads(job) if is_url(job.extract.output) else NoUploads()


def restore_progress(job: ExtractJob) -> None:
    """Replace the local staging folder's content by the progress stored at the job's URL, if it has one.

    Raise `UsageError` if a shard is missing or has another size, or if the URL contains other shards.
    """
    if not is_url(job.extract.output):
        return
    store = ObjectStore(job.extract.output, _FIELD)
    found = store.list()
    names = [name for name in found if name == STATE or _is_part(name)]
    states = {name: store.read(name) for name in names}
    for name, encoded in states.items():
        _refuse_missing(job, found, store.url, name, encoded)
    with RunLock(private_folder(job.local_output, _FIELD)):
        _clear(job)
        for name, encoded in states.items():
            file = job.local_output / name.replace(f"{_remote(PARTS)}/", f"{PARTS}/", 1)
            private_folder(file.parent)
            write_whole(file, encoded)
    folders = [f"{hook}/" for hook in job.model.hooks]
    if STATE not in states and any(name.endswith(".safetensors") and name.startswith(tuple(folders)) for name in found):
        raise UsageError(f"{_FIELD}: {store.url} contains other shards; choose another folder or delete them")


def _clear(job: ExtractJob) -> None:
    """Remove shards and progress that an earlier start left in the staging folder."""
    output = job.local_output
    (output / STATE).unlink(missing_ok=True)
    shutil.rmtree(output / PARTS, ignore_errors=True)
    for hook in job.model.hooks:
        for file in job.folder(hook).glob("*.safetensors*"):
            with contextlib.suppress(OSError):
                os.unlink(file)


def _refuse_missing(job: ExtractJob, found: dict[str, int], url: str, name: str, encoded: bytes) -> None:
    try:
        state = decode_as(encoded, ExtractionState)
    except ValueError:
        raise UsageError(f"{_FIELD}: {joined(url, name)} is not the progress of an extraction; delete it") from None
    for hook, shards in zip(job.model.hooks, state.shards, strict=False):
        for shard in shards:
            size = found.get(place := f"{hook}/{shard.name}")
            if size is None or size != shard.n_bytes:
                what = "is missing" if size is None else f"has {size:,} bytes instead of {shard.n_bytes:,}"
                raise UsageError(f"{_FIELD}: {joined(url, place)} {what}; delete {url} or choose another folder")


def _is_part(name: str) -> bool:
    return name.startswith(f"{_remote(PARTS)}/") and name.endswith(f"/{STATE}")


def _remote(name: str) -> str:
    """Return an object's name; names that begin with a dot are not listed."""
    return name.removeprefix(".")

"""Keeps local copies of the shards at a URL: first their headers, then whole shards in the order of their use.

A shard's local file has its full size from the start, so other modules read headers and map files as usual. The file's
rows are a hole until the shard is downloaded, and become a hole again when the cache needs room. A state file records
what the local file contains; a lock file is held by the processes that use the rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import operator
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainer.contract.errors import UserError, first_line
from trainer.contract.files import replacing, write_whole
from trainer.contract.json_file import read_json
from trainer.contract.locks import try_lock
from trainer.contract.object_paths import objects_folder, url_of
from trainer.contract.object_store import ObjectFacts, ObjectStore, Unreachable
from trainer.contract.paths import open_private, private_folder
from trainer.contract.wording import gibibytes, join_words

KINDS = (".safetensors", ".npy")
# The names of the small files that are read together with the shards.
_BESIDE = ("meta.json", "tokens.json")
_PROGRESS = "extraction.json"
_LARGEST_BESIDE = 2**28
_HEAD, _LARGEST_HEADER = 2**16, 100_000_000
# The number of bytes in a request for rows, and the numbers of requests at a time.
_PIECE = 2**24
_HEADERS_AT_ONCE, SHARDS_AT_ONCE = 16, 4
# The share of the free disk space that the cache may use by default.
_SHARE_OF_DISK = 0.8
# How long training waits for a store that does not answer before it stops, and the longest wait between two tries.
PATIENCE_S, LONGEST_WAIT_S = 300.0, 30.0
_POLL_S = 0.05
# The bandwidth is the mean over this time, as far as this many pieces cover it.
_RATE_OVER_S, _PIECES_OF_RATE = 10.0, 1024
_LOCKED_FOR_S, _CHANGED_FOR_S = 60.0, 5.0
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

_refreshed: set[Path] = set()
_refreshing = threading.RLock()


class Copy(msgspec.Struct, frozen=True):
    """What a local file holds of an object, and the object's size, version and recorded SHA-256."""

    size: int
    version: str
    sha256: str = ""
    holds: Literal["header", "columns", "rows"] = "header"

    @property
    def stamp(self) -> int:
        """A number that identifies the content, in place of a modification time."""
        return int.from_bytes(hashlib.sha256((self.sha256 or self.version).encode()).digest()[:7])


def copy_of(file: Path) -> Copy | None:
    """Return what a local file holds of an object, or None if the file is not the copy of an object."""
    return read_json(_state_of(file, ".json"), Copy) if url_of(file) else None


def refresh(folder: Path, field: str, sums_of: Callable[[Path], Mapping[str, str]]) -> None:
    """Bring the headers of the shards at the URL of a local folder up to date, once per process.

    `sums_of` returns the SHA-256 of each shard that a folder's metadata records. Raise `UserError` for the setting
    `field` if the store cannot be read or has no shards there.
    """
    with _refreshing:
        if folder in _refreshed:
            return
        place = folder.parent if folder.suffix in KINDS else folder
        url = url_of(place)
        assert url is not None
        store = ObjectStore(url, field)
        found = store.list_facts()
        names = [name for name in found if _is_shard(name) and place in (folder, folder.parent)]
        if folder != place:
            names = [name for name in names if name == folder.name]
        if not names:
            raise UserError(f"{field}: there are no {' or '.join(KINDS)} shards at {store.url}{_folders_in(found)}")
        private_folder(objects_folder())
        private_folder(place)
        with _on_disk(field), ThreadPoolExecutor(_HEADERS_AT_ONCE, "shard-headers") as pool:
            _keep_beside(store, place, found)
            _keep_progress(place.parent, field)
            _forget_others(place, {*names} if folder == place else None)
            sums = sums_of(place)
            list(pool.map(lambda name: _keep_header(store, place / name, found[name], sums.get(name, "")), names))
        _refreshed.add(folder)


def forget_refreshed() -> None:
    """Read the headers again when they are needed next."""
    _refreshed.clear()


def keep_columns(files: Collection[Path], field: str) -> None:
    """Download the numbers per row of shards, such as their texts, so that only the rows are missing."""
    lacking = [file for file in files if (copy := copy_of(file)) and copy.holds == "header"]
    stores = {folder: ObjectStore(str(url_of(folder)), field) for folder in {file.parent for file in lacking}}
    with _on_disk(field), ThreadPoolExecutor(_HEADERS_AT_ONCE, "shard-columns") as pool:
        list(pool.map(lambda file: _keep_columns(stores[file.parent], file), lacking))


def cache_limit(cache_gb: float | None) -> int:
    """Return the number of bytes that the cache may take on the disk; by default, most of the free space."""
    if cache_gb is not None:
        return int(cache_gb * 1e9)
    folder = private_folder(objects_folder())
    status = os.statvfs(folder)
    return int(_SHARE_OF_DISK * (status.f_bavail * status.f_frsize + sum(_used(folder).values())))


def used_by_others(caches: Iterable[RowCache]) -> int:
    """Return the disk space in bytes that shards outside these caches keep: whole ones in use, for example by another
    job, and the headers of all others.
    """
    own = {file for cache in caches for file in cache.files}
    others = {file: n_bytes for file, n_bytes in _used(objects_folder()).items() if file not in own}
    unused = {file for file in _by_last_use(others) if not _is_in_use(file)}
    return sum(n_bytes for file, n_bytes in others.items() if file not in unused)


class RowCache:
    """Downloads the rows of shards in the background, and keeps them while this process uses them."""

    on_wait: Callable[[float], object]

    def __init__(self, files: Collection[Path], field: str, limit: int) -> None:
        self._field, self._limit = field, limit
        # The number of bytes downloaded so far. `on_wait` is called with the seconds that a thread has waited.
        self.n_read, self.on_wait = 0, (lambda _: None)
        # Whether threads that wait for a shard give up.
        self.is_interrupted = False
        self._copies = {file: copy for file in files if (copy := copy_of(file))}
        self._stores = {
            folder: ObjectStore(str(url_of(folder)), field) for folder in {file.parent for file in self._copies}
        }
        # The descriptors whose shared locks keep rows in the cache.
        self._held: dict[Path, int] = {}
        self._wanted: list[Path] = []
        # The number of threads that wait for a shard or read it.
        self._readers: Counter[Path] = Counter()
        self._going: set[Path] = set()
        self._failures: dict[Path, tuple[UserError, float]] = {}
        self._n_failed, self._is_closed = 0, False
        self._changed = threading.Condition()
        # When the last pieces were downloaded, and their sizes.
        self._pieces: deque[tuple[float, int]] = deque(maxlen=_PIECES_OF_RATE)
        self._threads: list[threading.Thread] = []

    @property
    def files(self) -> Collection[Path]:
        """The local files of all shards."""
        return self._copies.keys()

    @property
    def n_bytes(self) -> int:
        """The total size of all shards."""
        return sum(copy.size for copy in self._copies.values())

    @property
    def rate(self) -> float:
        """The number of bytes per second over the last downloads."""
        with self._changed:
            pieces = [*self._pieces]
        recent = [(at, n) for at, n in pieces if at > time.monotonic() - _RATE_OVER_S]
        seconds = time.monotonic() - recent[0][0] if recent else 1.0
        return sum(n for _, n in recent) / max(1.0, seconds)

    @property
    def n_bytes_beside(self) -> int:
        """The size of the headers and columns of all shards, which stay in the cache."""
        spans = (_rows_in(file) for file in self._copies)
        return self.n_bytes - sum(last - first for first, last in spans)

    def want(self, files: Sequence[Path]) -> None:
        """Download these shards in this order, and release all others."""
        with self._changed:
            self._wanted = [file for file in files if file in self._copies]
            # There may be room now for shards that did not fit.
            self._failures.clear()
            for file in self._held.keys() - set(self._wanted) - set(+self._readers):
                os.close(self._held.pop(file))
            self._start()
            self._changed.notify_all()

    @contextlib.contextmanager
    def reading(self, file: Path) -> Iterator[None]:
        """Wait until a shard's rows are in its file, and keep them there until the context exits.

        Raise `UserError` if the rows cannot be downloaded.
        """
        if file not in self._copies:
            yield
            return
        with self._changed:
            self._readers[file] += 1
        try:
            with self._changed:
                if file not in self._held:
                    self._wait_for(file)
            yield
        finally:
            with self._changed:
                self._readers[file] -= 1

    def _wait_for(self, file: Path) -> None:
        began = time.monotonic()
        self._failures.pop(file, None)
        self._start()
        self._changed.notify_all()
        while file not in self._held:
            waited = time.monotonic() - began
            if self.is_interrupted:
                raise UserError(f"{self._field}: the wait for {file.name} was interrupted")
            error, _ = self._failures.get(file, (None, 0.0))
            if error and (not isinstance(error, Unreachable) or waited > PATIENCE_S):
                raise error
            self.on_wait(waited)
            self._changed.wait(0.5)

    def close(self) -> None:
        """Stop downloading, and release all shards."""
        with self._changed:
            self._is_closed, self._wanted = True, []
            for descriptor in self._held.values():
                os.close(descriptor)
            self._held.clear()
            self._changed.notify_all()

    def _start(self) -> None:
        # Daemon threads, so that a store that does not answer cannot keep the process alive.
        while len(self._threads) < SHARDS_AT_ONCE and not self._is_closed:
            thread = threading.Thread(target=self._work, name="shard-download", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work(self) -> None:
        while (file := self._next()) is not None:
            try:
                descriptor = self._fetch(file)
            except UserError as error:
                self._note_failure(file, error)
                continue
            except Exception as error:
                self._note_failure(file, UserError(f"{self._field}: {file} cannot be cached: {first_line(error)}"))
                continue
            with self._changed:
                self._going.discard(file)
                self._failures.pop(file, None)
                self._n_failed = 0
                is_wanted = file in self._wanted or self._readers[file] > 0
                if self._is_closed or not is_wanted or file in self._held:
                    os.close(descriptor)
                else:
                    self._held[file] = descriptor
                self._changed.notify_all()

    def _next(self) -> Path | None:
        """Wait for the next shard to download; return None when the cache is closed."""
        with self._changed:
            while not self._is_closed:
                now = time.monotonic()
                for file in (*+self._readers, *self._wanted):
                    _, retry_at = self._failures.get(file, (None, 0.0))
                    if file not in self._held and file not in self._going and now >= retry_at:
                        self._going.add(file)
                        return file
                self._changed.wait(0.5)
            return None

    def _note_failure(self, file: Path, error: UserError) -> None:
        with self._changed:
            self._going.discard(file)
            self._n_failed += 1
            wait_s = min(LONGEST_WAIT_S, 0.5 * 2 ** min(self._n_failed, 10))
            self._failures[file] = error, time.monotonic() + wait_s
            if isinstance(error, _NoRoom):
                self._release_later(file, error)
            self._changed.notify_all()

    def _release_later(self, file: Path, error: UserError) -> None:
        """Release the last of the shards that are needed after one that does not fit, and download it again later."""
        order = [*+self._readers, *self._wanted]
        later = order[order.index(file) + 1 :] if file in order else []
        last = next((one for one in reversed(later) if one in self._held and not self._readers[one]), None)
        if last is not None:
            os.close(self._held.pop(last))
            self._failures[last] = error, time.monotonic() + LONGEST_WAIT_S
            self._failures[file] = error, 0.0

    def _fetch(self, file: Path) -> int:
        """Return a descriptor with a shared lock on a shard whose rows are in its file."""
        descriptor = open_private(_state_of(file, ".lock"), 0)
        try:
            while not self._is_closed:
                if try_lock(descriptor, shared=True):
                    if self._is_whole(file):
                        os.utime(_state_of(file, ".lock"))
                        return descriptor
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                if try_lock(descriptor):
                    if not self._is_whole(file):
                        with _on_disk(self._field):
                            self._download(file)
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
                else:
                    # Another process downloads the shard.
                    time.sleep(_POLL_S)
            raise UserError(f"{self._field}: the cache was closed")
        except BaseException:
            os.close(descriptor)
            raise

    def _is_whole(self, file: Path) -> bool:
        copy, expected = copy_of(file), self._copies[file]
        if copy is not None and (copy.size, copy.version) != (expected.size, expected.version):
            raise self._of_change(file)
        return copy is not None and copy.holds == "rows" and _size_of(file) == copy.size

    def _download(self, file: Path) -> None:
        copy, store = self._copies[file], self._stores[file.parent]
        if not self._is_current(file):
            raise self._of_change(file)
        digest = hashlib.sha256()
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._make_room(descriptor, file, copy.size)
            for first in range(0, copy.size, _PIECE):
                piece = store.read(file.name, first, last := min(first + _PIECE, copy.size))
                if len(piece) != last - first:
                    raise self._of_mixture(file)
                _write_at(descriptor, piece, first)
                digest.update(piece)
                with self._changed:
                    self.n_read += len(piece)
                    self._pieces.append((time.monotonic(), len(piece)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        if not self._is_current(file):
            raise self._of_mixture(file)
        if copy.sha256 and digest.hexdigest() != copy.sha256:
            raise UserError(
                f"{self._field}: {store.url}/{file.name} has another SHA-256 than meta.json records; upload it again"
            )
        _write_copy(file, msgspec.structs.replace(copy, holds="rows"))

    def _is_current(self, file: Path) -> bool:
        copy = self._copies[file]
        return self._stores[file.parent].facts(file.name) == ObjectFacts(copy.size, copy.version)

    def _of_mixture(self, file: Path) -> UserError:
        # The header and the columns, too, may be of another version, even if this version is restored.
        _write_copy(file, msgspec.structs.replace(self._copies[file], version="", holds="header"))
        return self._of_change(file)

    def _of_change(self, file: Path) -> UserError:
        place = f"{self._stores[file.parent].url}/{file.name}"
        return UserError(f"{self._field}: {place} has changed since this process opened it; restore it, or start again")

    def _make_room(self, descriptor: int, file: Path, size: int) -> None:
        """Reserve disk space for a shard, removing the rows that no process has used for the longest time."""
        with _locked(private_folder(objects_folder() / ".state") / "room.lock"):
            used = _used(objects_folder())
            total, oldest_first = sum(used.values()), iter(_by_last_use(used))
            total += size - used.get(file, 0)
            while True:
                if total <= self._limit:
                    try:
                        # Without a reservation, downloads in parallel would each find the same free space.
                        os.posix_fallocate(descriptor, 0, size)
                        return
                    except OSError as error:
                        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                            return  # the file system cannot reserve space
                old = next((one for one in oldest_first if one != file and _evict(one)), None)
                if old is None:
                    raise self._of_room(size)
                total -= used[old]

    def _of_room(self, size: int) -> UserError:
        room = f"the cache {objects_folder()} may take {gibibytes(self._limit)}"
        return _NoRoom(
            f"{self._field}: {room}, and a shard of {gibibytes(size)} does not fit next to the shards in use;"
            " raise data.cache_gb, free some space, or lower data.shuffle_shards"
        )


class _NoRoom(Unreachable):
    """Raised if a shard does not fit; another job may soon release its shards."""


@contextlib.contextmanager
def _on_disk(field: str) -> Iterator[None]:
    """Raise `UserError` instead of `OSError`, for example if the disk is full."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"{field}: shards cannot be cached in {objects_folder()}: {reason}; free some space, or set"
            " data.cache_gb and data.shuffle_shards"
        ) from None


@contextlib.contextmanager
def whole(file: Path, field: str = "data.path") -> Iterator[None]:
    """Keep all of a shard in its file in this context if the file is the copy of an object."""
    cache = RowCache([file], field, cache_limit(None)) if copy_of(file) else None
    with cache.reading(file) if cache else contextlib.nullcontext():
        yield
    if cache:
        cache.close()


def _state_of(file: Path, suffix: str) -> Path:
    root = objects_folder()
    return root / ".state" / f"{file.relative_to(root)}{suffix}"


def _write_copy(file: Path, copy: Copy) -> None:
    state = _state_of(file, ".json")
    private_folder(state.parent)
    write_whole(state, msgspec.json.encode(copy), durable=copy.holds == "rows")


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return -1


def _is_shard(name: str) -> bool:
    return "/" not in name and name.endswith(KINDS)


def _folders_in(found: Mapping[str, ObjectFacts]) -> str:
    """Return advice that names the subfolders with shards, or the formats that can be read."""
    folders = sorted({name.rpartition("/")[0] for name in found if name.endswith(KINDS) and "/" in name})
    if folders:
        return f"; give one of its subfolders: {join_words(folders[:8])}"
    return "; other formats are only read from local folders" if found else ""


def _keep_beside(
    store: ObjectStore, folder: Path, found: Mapping[str, ObjectFacts], names: Sequence[str] = _BESIDE
) -> None:
    """Download the small files next to the shards, and remove files that no longer exist."""
    for name in names:
        facts, file = found.get(name), folder / name
        if facts is None or facts.size > _LARGEST_BESIDE:
            file.unlink(missing_ok=True)
            continue
        copy = Copy(facts.size, facts.version, holds="rows")
        if copy_of(file) != copy or _size_of(file) != facts.size:
            store.get(name, file, facts.size)
            _write_copy(file, copy)


def _keep_progress(folder: Path, field: str) -> None:
    """Download the progress of the extraction that wrote the shards, if the parent folder has one."""
    url = url_of(folder)
    with contextlib.suppress(UserError):
        if url is not None:
            store = ObjectStore(url, field)
            _keep_beside(store, folder, {_PROGRESS: store.facts(_PROGRESS)}, (_PROGRESS,))


def _forget_others(folder: Path, names: Collection[str] | None) -> None:
    """Remove the copies of shards that the store no longer has."""
    for file in folder.iterdir() if names is not None else ():
        if file.suffix in KINDS and file.name not in (names or ()) and file.is_file():
            _state_of(file, ".json").unlink(missing_ok=True)
            file.unlink(missing_ok=True)


def _keep_header(store: ObjectStore, file: Path, facts: ObjectFacts, sha256: str) -> None:
    if (known := copy_of(file)) and _is_copy(file, known, facts) and (known.sha256 == sha256 or _is_in_use(file)):
        return
    in_use = f"{store.url}/{file.name} has changed, and another job still uses it"
    with _locked(_state_of(file, ".lock"), in_use if known else ""):
        # Another process may have read the header in the meantime, and may have mapped the file.
        if (known := copy_of(file)) and _is_copy(file, known, facts):
            # Rows whose SHA-256 was unknown when they were downloaded are downloaded again.
            if known.sha256 != sha256:
                _write_copy(file, msgspec.structs.replace(known, sha256=sha256, holds="header"))
            return
        head = store.read(file.name, 0, min(_HEAD, facts.size))
        if file.suffix == ".safetensors" and _HEAD < (n := _header_size(head)) <= min(_LARGEST_HEADER, facts.size):
            head += store.read(file.name, len(head), n)
        _state_of(file, ".json").unlink(missing_ok=True)
        with replacing(file, 0o600, durable=False) as stream:
            stream.write(head)
            stream.truncate(facts.size)
        _write_copy(file, Copy(*facts, sha256))


def _is_copy(file: Path, copy: Copy, facts: ObjectFacts) -> bool:
    return (copy.size, copy.version) == facts and _size_of(file) == facts.size


def _is_in_use(file: Path) -> bool:
    descriptor = open_private(_state_of(file, ".lock"), 0)
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)


def _keep_columns(store: ObjectStore, file: Path) -> None:
    with _locked(_state_of(file, ".lock")):
        copy = copy_of(file)
        if copy is None or copy.holds != "header":
            return
        first, last = _rows_in(file)
        descriptor = os.open(file, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for begin, end in ((_HEAD, first), (max(_HEAD, last), copy.size)):
                # A file from another program may contain more tensors as large as its rows.
                for at in range(begin, end, _PIECE):
                    _write_at(descriptor, store.read(file.name, at, min(at + _PIECE, end)), at)
        finally:
            os.close(descriptor)
        _write_copy(file, msgspec.structs.replace(copy, holds="columns"))


def _header_size(head: bytes) -> int:
    return 8 + int.from_bytes(head[:8], "little")


def _rows_in(file: Path) -> tuple[int, int]:
    """Return the first and last byte of the largest matrix in a shard, which contains its rows."""
    size = file.stat().st_size
    if file.suffix != ".safetensors":
        return min(_HEAD, size), size
    try:
        with open(file, "rb") as stream:
            begin = _header_size(stream.read(8))
            header: Any = json.loads(stream.read(min(begin, _LARGEST_HEADER) - 8))
        tensors = [one for name, one in header.items() if name != "__metadata__"]
        # Numbers per row can be larger than very narrow rows.
        matrices = [one for one in tensors if len(one["shape"]) > 1] or tensors
        spans = [tuple(map(operator.index, one["data_offsets"])) for one in matrices]
        first, last = max(spans, key=lambda span: span[1] - span[0])
        return min(begin + max(0, first), size), min(begin + last, size)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return min(_HEAD, size), size  # the reader of the header reports the problem


def _write_at(descriptor: int, content: bytes, offset: int) -> None:
    left = memoryview(content)
    while left:
        n = os.pwrite(descriptor, left, offset)
        left, offset = left[n:], offset + n


def _used(folder: Path) -> dict[Path, int]:
    """Return the disk space that each copy of a shard takes, in bytes."""
    used = {}
    for place, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith(".")]
        for name in names:
            if name.endswith(KINDS):
                with contextlib.suppress(FileNotFoundError):
                    file = Path(place, name)
                    used[file] = file.stat().st_blocks * 512
    return used


def _by_last_use(used: Mapping[Path, int]) -> list[Path]:
    """Return the shards whose rows take space, beginning with the one that was used longest ago."""
    times = {}
    for file, n_bytes in used.items():
        if n_bytes > _size_of(file) // 2:
            with contextlib.suppress(FileNotFoundError):
                times[file] = _state_of(file, ".lock").stat().st_mtime_ns
    return sorted(times, key=lambda file: times[file])


def _evict(file: Path) -> bool:
    """Give the disk space of a shard's rows back, unless a process uses them; return whether this succeeded."""
    descriptor = open_private(_state_of(file, ".lock"), 0)
    try:
        copy = copy_of(file)
        if copy is None or not try_lock(descriptor):
            return False
        if copy.holds == "rows":
            _write_copy(file, msgspec.structs.replace(copy, holds="columns"))
        _punch(file, *_rows_in(file))
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _punch(file: Path, first: int, last: int) -> None:
    """Turn a range of a file into a hole; remove the file if its file system cannot do this."""
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fallocate = ctypes.CDLL(None, use_errno=True).fallocate64
        offset, length = ctypes.c_int64(first), ctypes.c_int64(last - first)
        failed = last > first and fallocate(descriptor, _PUNCH_HOLE, offset, length)
    finally:
        os.close(descriptor)
    if failed:
        # Processes that have mapped the file keep its old content.
        _state_of(file, ".json").unlink(missing_ok=True)
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(lock: Path, otherwise: str = "") -> Iterator[None]:
    """Hold an exclusive lock; raise `UserError` if another process keeps it for too long."""
    private_folder(lock.parent)
    descriptor = open_private(lock, 0)
    try:
        ends = time.monotonic() + (_CHANGED_FOR_S if otherwise else _LOCKED_FOR_S)
        while not try_lock(descriptor):
            if time.monotonic() > ends:
                raise UserError(otherwise or f"{lock} is locked by another process; wait for it, or stop it")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)

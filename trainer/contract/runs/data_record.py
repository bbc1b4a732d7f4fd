"""Records the shards that a run is trained on, and checks whether the shards have changed since then."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.files import open_plain
from trainer.contract.object_paths import url_of
from trainer.contract.settings.shards import inspect_shards, recorded_sums
from trainer.contract.settings.sources import SourceSettings
from trainer.contract.store.rows import Count
from trainer.contract.wording import join_words, plural

if TYPE_CHECKING:
    from trainer.contract.object_cache import Copy

BLOCK = 2**16
# The maximum number of bytes to read in order to identify the contents of all shards. Smaller data is read completely;
# from larger data, only evenly spaced blocks are read. Reading the blocks from the page cache takes 0.2 to 0.6 s during
# the first steps of a run.
_SAMPLED_BYTES = 2**28
_LEAST_BLOCKS = 4
_MOST_NAMES = 4
_NOT_RECORDED = (
    "data.path: the checkpoint is from an older version, which recorded no shards; "
    "make sure that no shards were changed or added, since the run would otherwise train on held-out rows"
)
_WAY_OUT = "restore the data, or start a new run on the current data"


class ShardRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A shard file.

    `sha256` is the checksum in `meta.json`. `sample` is the SHA-256 of `n_blocks` blocks of the file.
    """

    name: str
    rows: Count
    size: Count
    mtime_ns: int
    inode: Count = 0
    sha256: str | None = None
    n_blocks: Count = 0
    sample: str | None = None


class FolderRecord(msgspec.Struct, frozen=True):
    """The shards in a folder, ordered by row number; new shards come last.

    Held-out rows are chosen from the first `split_rows` rows, which existed when the run started. The rows of
    `shuffle_shards` shards are shuffled together; 0 stands for all.
    """

    field: str
    path: str
    split_rows: Count
    shards: tuple[ShardRecord, ...]
    shuffle_shards: Count = 0

    @property
    def names(self) -> list[str]:
        return [shard.name for shard in self.shards]

    def file(self, shard: ShardRecord) -> Path:
        """Return the path of a shard."""
        root = Path(os.path.expanduser(self.path))
        return root / shard.name if root.is_dir() or root.name != shard.name else root


DataRecord = list[FolderRecord]


def record_of(sources: Iterable[SourceSettings], before: DataRecord | None = None) -> DataRecord:
    """Return records of each hook's current data, without samples, because reading samples takes time.

    If the run was already trained on the shards in `before`, those shards come first, with their samples, and new
    shards follow. Raise `JobFileError` if one of the recorded shards has changed.
    """
    now = [_look(field, path) for settings in sources for field, path in settings.stored_at()]
    if before is None:
        return now
    if len(before) != len(now):
        counts = f"{plural(len(before), 'folder')} before and {len(now)} now"
        raise JobFileError([Problem("data.path", f"the run was trained on other data: {counts}; {_WAY_OUT}")])
    return [_continued(old, new) for old, new in zip(before, now, strict=True)]


def sampled(record: DataRecord) -> DataRecord:
    """Return the record with shard samples, except for files that cannot be read or have changed."""
    n_blocks = _SAMPLED_BYTES // BLOCK // max(1, sum(len(folder.shards) for folder in record))
    n_blocks = max(_LEAST_BLOCKS, n_blocks)
    return [
        msgspec.structs.replace(folder, shards=tuple(_with_sample(folder, one, n_blocks) for one in folder.shards))
        for folder in record
    ]


def news_of_data(before: DataRecord | None, now: DataRecord) -> str | None:
    """Return a sentence about the shards added since a checkpoint, or None if there are none."""
    if before is None:
        return _NOT_RECORDED if now else None
    new = [one for old, folder in zip(before, now, strict=True) for one in folder.shards[len(old.shards) :]]
    if not new:
        return None
    names = [one.name for one in new]
    shown = [*names[:_MOST_NAMES], *([f"{len(names) - _MOST_NAMES} more"] if names[_MOST_NAMES:] else [])]
    rows = f"{plural(sum(one.rows for one in new), 'row')} in {join_words(shown)}"
    return f"data.path: the data has grown by {rows}; the held-out rows stay the same, and training uses all new rows"


def change_of(folder: FolderRecord, shard: ShardRecord) -> str | None:
    """Describe how a shard has changed since it was recorded; return None if it contains the same bytes.

    A file with the same size and modification time is considered unchanged and is not read.
    """
    file = folder.file(shard)
    try:
        status = file.stat()
        if status.st_size != shard.size:
            return f"has {status.st_size:,} bytes instead of {shard.size:,}"
        if copy := _copy_of(file):
            is_same = copy.stamp == shard.mtime_ns or (copy.sha256 and copy.sha256 == shard.sha256)
            return None if is_same else "contains different values"
        if status.st_mtime_ns == shard.mtime_ns:
            return None
        if shard.sample is None:
            return "was modified and has no checksum, so it may contain other rows"
        return None if _sample(file, shard.n_blocks) == shard.sample else "contains different values"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def cut_short(record: DataRecord) -> str | None:
    """Return a sentence about the first shard with fewer bytes than recorded, or None."""
    for folder in record:
        for shard in folder.shards:
            try:
                size = folder.file(shard).stat().st_size
            except OSError:
                continue
            if size < shard.size:
                return cut_sentence(folder.file(shard), size, shard.size)
    return None


def cut_sentence(file: Path, size: int, before: int) -> str:
    """Return a sentence about a file truncated while being read, with the remedy."""
    return f"{file} was truncated to {size:,} of {before:,} bytes while it was read; copy it again, then resume"


def _look(field: str, path: str) -> FolderRecord:
    """Return a record of the shards in a folder, based on their headers and file attributes."""
    rows: Counter[Path] = Counter()
    for shard in inspect_shards(path, field).shards:
        rows[shard.file] += shard.n_tokens
    sums = recorded_sums(next(iter(rows)).parent)
    shards = tuple(_facts(file, n_rows, sums.get(file.name)) for file, n_rows in rows.items())
    return FolderRecord(field, path, rows.total(), shards)


def _facts(file: Path, rows: int, sha256: str | None) -> ShardRecord:
    status, copy = file.stat(), _copy_of(file)
    # The copy of an object changes when its rows are downloaded, but its content does not.
    mtime_ns, inode = (copy.stamp, 0) if copy else (status.st_mtime_ns, status.st_ino)
    return ShardRecord(file.name, rows, status.st_size, mtime_ns, inode, sha256)


def _continued(old: FolderRecord, new: FolderRecord) -> FolderRecord:
    """Return a folder's current shards, the recorded shards first.

    Raise `JobFileError` if a recorded shard has changed.
    """
    by_name = {shard.name: shard for shard in new.shards}
    kept = []
    for shard in old.shards:
        there = by_name.pop(shard.name, None)
        if why := _difference(shard, there) or change_of(new, shard):
            known = f"the run was trained on {shard.name} in {new.path}, which {why}"
            raise JobFileError([Problem(new.field, f"{known}; {_WAY_OUT}")])
        assert there is not None
        kept.append(msgspec.structs.replace(there, n_blocks=shard.n_blocks, sample=shard.sample))
    shards = (*kept, *by_name.values())
    return msgspec.structs.replace(new, split_rows=old.split_rows, shuffle_shards=old.shuffle_shards, shards=shards)


def _copy_of(file: Path) -> Copy | None:
    """Return what a local file holds of an object, or None for any other file."""
    if url_of(file) is None:
        return None
    from trainer.contract.object_cache import copy_of

    return copy_of(file)


def _difference(old: ShardRecord, new: ShardRecord | None) -> str | None:
    """Describe how a shard differs from its record, or return None if it does not, without reading its rows."""
    if new is None:
        return "is missing"
    if new.rows != old.rows:
        return f"has {plural(new.rows, 'row')} instead of {old.rows:,}"
    if old.sha256 and new.sha256 and old.sha256 != new.sha256:
        return "has a different SHA-256 in meta.json"
    return None


def _with_sample(folder: FolderRecord, shard: ShardRecord, n_blocks: int) -> ShardRecord:
    if shard.sample is not None or url_of(folder.file(shard)):
        return shard
    try:
        sample = _sample(file := folder.file(shard), n_blocks)
        status = file.stat()
    except OSError:
        return shard
    # If the file changed after its rows were counted, a new sample would hide the change.
    if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
        return shard
    return msgspec.structs.replace(shard, n_blocks=n_blocks, sample=sample)


def _sample(file: Path, n_blocks: int) -> str:
    """Return the SHA-256 of evenly spaced blocks of a file, including both ends; a small file is hashed entirely."""
    # Only a trainer hashes rows, and loading OpenSSL takes 2 ms.
    import hashlib

    digest = hashlib.sha256()
    with open_plain(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size <= n_blocks * BLOCK:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        for place in _places(size, n_blocks):
            digest.update(os.pread(stream.fileno(), BLOCK, place))
    return digest.hexdigest()


def _places(size: int, n_blocks: int) -> Sequence[int]:
    """Return the offsets of evenly spaced blocks in a file."""
    return [number * (size - BLOCK) // max(1, n_blocks - 1) for number in range(n_blocks)]

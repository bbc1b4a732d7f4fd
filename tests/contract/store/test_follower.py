"""Tests for following a store that real processes write, replace, damage or lock."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from trainer.contract.store import database
from trainer.contract.store.database import StoreError
from trainer.contract.store.follower import StoreFollower
from trainer.contract.store.metrics_store import MetricRow, SeriesReader, SeriesWriter

# For each number that it reads, this program writes that many steps, and prints the last one.
WRITER = """
import sys
from pathlib import Path
from trainer.contract.store.metrics_store import MetricRow, SeriesWriter
writer, step = SeriesWriter(Path(sys.argv[1])), 0
for line in sys.stdin:
    for _ in range(int(line)):
        step += 1
        writer.write([MetricRow("loss", step, 1.0), MetricRow("fvu", step, 1.0)])
    print(step, flush=True)
"""
HOLDER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA locking_mode=EXCLUSIVE")
db.execute("BEGIN EXCLUSIVE")
db.execute("INSERT INTO keys(name) VALUES('held')")
print("held", flush=True)
sys.stdin.readline()
db.execute("ROLLBACK")
db.close()
print("free", flush=True)
sys.stdin.readline()
"""
Become = Callable[[], AbstractContextManager[None]]


class Followed:
    """A follower of a run's metrics that records the last step at each read."""

    def __init__(self, path: Path) -> None:
        self.follower = StoreFollower(path, SeriesReader)
        self.seen: list[int | None] = []

    def poll(self) -> bool:
        return self.follower.poll(self._read)

    def _read(self, reader: SeriesReader | None) -> None:
        steps = [point.step for point in reader.points("loss")] if reader else None
        if steps:
            assert steps == list(range(steps[0], steps[-1] + 1))
        self.seen.append(steps[-1] if steps else None)


@pytest.fixture
def path(tmp_path: Path, copy_store: Callable[..., Path]) -> Path:
    return copy_store("metrics", tmp_path / "metrics.db")


@pytest.fixture
def followed(path: Path) -> Iterator[Followed]:
    followed = Followed(path)
    yield followed
    followed.follower.close()


def write(path: Path, *steps: int) -> None:
    with contextlib.closing(SeriesWriter(path)) as writer:
        for step in steps:
            writer.write([MetricRow("loss", step, 1.0)])


def replacement(path: Path, copy_store: Callable[..., Path], *steps: int) -> Path:
    """Create a store with the given steps that can replace the store at `path`."""
    other = copy_store("metrics", path.with_name("other.db"))
    write(other, *steps)
    return other


def remove(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.unlink()


def test_a_store_is_read_once_after_each_change(path: Path, followed: Followed) -> None:
    write(path, 1)
    assert [followed.poll(), followed.poll()] == [True, False]
    write(path, 2)
    assert [followed.poll(), followed.poll()] == [True, False]
    assert followed.seen == [1, 2]


def test_a_missing_store_is_read_once_it_exists(tmp_path: Path) -> None:
    followed = Followed(tmp_path / "later.db")
    assert not followed.poll()
    (tmp_path / "later.db").touch()
    assert not followed.poll(), "a file without tables is not yet a store"
    write(tmp_path / "later.db", 1)
    assert followed.poll()
    assert followed.seen == [1]
    followed.follower.close()


def test_a_deleted_store_is_reported_once_and_read_again_when_it_returns(path: Path, followed: Followed) -> None:
    write(path, 1)
    followed.poll()
    remove(path)
    assert [followed.poll(), followed.poll()] == [True, False]
    write(path, 7)
    assert followed.poll()
    assert followed.seen == [1, None, 7]


def test_a_replaced_store_is_read_from_the_start(
    path: Path, followed: Followed, copy_store: Callable[..., Path], child: Callable[..., Any]
) -> None:
    writer = child(WRITER, path)
    writer.tell(3)
    assert writer.hear() == "3"
    followed.poll()
    other = replacement(path, copy_store, 7)
    for suffix in database.BESIDE:
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    other.rename(path)
    # The writer continues to write to the deleted file.
    writer.tell(1)
    assert writer.hear() == "4"
    assert followed.poll()
    assert followed.seen == [3, 7]


def test_a_new_file_with_the_same_inode_is_read_from_the_start(path: Path, followed: Followed) -> None:
    write(path, 1)
    followed.poll()
    followed.follower.close()
    copy = path.with_name("copy.db")
    write(path, 2)
    shutil.copy(path, copy)
    # The file is overwritten in place, so its inode stays the same.
    path.write_bytes(copy.read_bytes())
    assert followed.poll()
    assert followed.seen == [1, 2]


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0", b"garbage " * 1000], ids=["empty", "cut", "garbage"])
def test_a_damaged_store_raises_an_error_until_it_is_restored(content: bytes, path: Path, followed: Followed) -> None:
    write(path, 1)
    followed.poll()
    whole = path.read_bytes()
    remove(path)
    path.write_bytes(content)
    for _ in range(2):
        with contextlib.suppress(StoreError):
            followed.poll()
    path.write_bytes(whole)
    with contextlib.suppress(StoreError):
        followed.poll()
    write(path, 2)
    assert followed.poll()
    assert followed.seen[-1] == 2


def test_a_follower_survives_the_truncation_of_a_store_that_a_writer_has_open(
    path: Path, followed: Followed, child: Callable[..., Any]
) -> None:
    writer = child(WRITER, path, stderr=subprocess.DEVNULL)
    writer.tell(200)
    assert writer.hear() == "200"
    followed.poll()
    for size in (8192, 100, 0):
        os.truncate(path, size)
        with contextlib.suppress(StoreError):
            followed.poll()
    writer.process.kill()
    writer.process.wait()
    remove(path)
    write(path, 7)
    assert followed.poll()
    assert followed.seen[-1] == 7


def test_an_unreadable_store_raises_an_error_until_it_is_readable(
    open_folder: Path, copy_store: Callable[..., Path], ordinary_user: Become
) -> None:
    path = copy_store("metrics", open_folder / "metrics.db")
    write(path, 1)
    followed = Followed(path)
    for place, mode, allowed in ((path, 0o000, 0o644), (open_folder, 0o000, 0o755)):
        place.chmod(mode)
        with ordinary_user(), pytest.raises(StoreError, match=r"cannot be opened"):
            followed.poll()
        place.chmod(allowed)
    write(path, 2)
    assert followed.poll()
    assert followed.seen == [2]
    followed.follower.close()


def test_a_locked_store_is_read_after_the_lock_is_released(
    path: Path, followed: Followed, child: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_TIMEOUT_S", 0.05)
    write(path, 1)
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=delete")
    holder = child(HOLDER, path)
    assert holder.hear() == "held"
    for _ in range(2):
        with pytest.raises(StoreError, match=f"has been locked by another process .*process {holder.process.pid} "):
            followed.poll()
    holder.tell()
    assert holder.hear() == "free"
    assert followed.poll()
    assert followed.seen == [1]


def test_a_failed_read_is_repeated_at_the_next_poll(path: Path, followed: Followed) -> None:
    write(path, 1)

    def fail(_: SeriesReader | None) -> None:
        raise StoreError("it is locked")

    with pytest.raises(StoreError, match="it is locked"):
        followed.follower.poll(fail)
    assert followed.poll()
    assert followed.seen == [1]


def test_a_repeatedly_replaced_store_is_always_read_in_full(
    path: Path, followed: Followed, copy_store: Callable[..., Path], child: Callable[..., Any]
) -> None:
    code = """
import os, shutil, sys
from pathlib import Path
from trainer.contract.store.metrics_store import MetricRow, SeriesWriter
path, empty = map(Path, sys.argv[1:])
print("ready", flush=True)
for turn in range(1, 41):
    sys.stdin.readline()
    other = Path(shutil.copy(empty, path.with_name("other.db")))
    writer = SeriesWriter(other)
    for step in range(turn, turn + 5):
        writer.write([MetricRow("loss", step, 1.0)])
    writer.close()
    if turn % 2:
        for file in path.parent.glob("metrics.db*"):
            file.unlink()
    os.replace(other, path)
    print(turn, flush=True)
"""
    empty = copy_store("metrics", path.with_name("empty.db"))
    other = child(code, path, empty)
    assert other.hear() == "ready"
    write(path, 1)
    for turn in range(1, 41):
        other.tell()
        for _ in range(20):
            followed.poll()
        assert other.hear() == str(turn)
        followed.poll()
        assert followed.seen[-1] == turn + 4

"""Finds the metrics files that a program writes, and reads new data from them."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from sae_tui.jobs.program_metrics.event_files import read_events
from sae_tui.jobs.program_metrics.sources import MOST_BYTES, FilePosition, FileValues, MetricsFile
from sae_tui.jobs.program_metrics.trackio_files import read_trackio
from sae_tui.jobs.program_metrics.wandb_files import read_wandb
from trainer.contract.store.database import file_identity

# The time limit for a search. A program creates its files soon after it starts, so the first searches, and searches
# after new files were found, may take 1 % of a core. After a few searches without new files, the limit is 0.2 %.
SEARCH_S = 0.2
OFTEN_S, PAUSE = 2.0, 100
SELDOM_S, LONG_PAUSE = 30.0, 500
FRUITLESS = 2
DEEPEST = 8
MOST_FILES = 100
MOST_BYTES_PER_TURN = 2 * MOST_BYTES
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})
# A file system's clock may be a few milliseconds behind.
_CLOCK_S = 0.05


def reader_of(name: str) -> MetricsFile | None:
    """Return the reader for a file with this name, or None if it cannot contain metrics."""
    if "tfevents" in name:
        return read_events
    if name.endswith(".wandb"):
        return read_wandb
    return read_trackio if name.endswith(".db") else None


class MetricsFolders:
    """Follows the metrics files under a list of folders, ignoring files last written before a given time."""

    def __init__(
        self, roots: Iterable[Path], left_out: Path, since: float, positions: dict[str, FilePosition],
        own_pids: Callable[[], Iterable[int]],
    ) -> None:  # fmt: skip
        """Follow files below `roots`, but not below `left_out`; ignore files that processes outside `own_pids` write.

        `positions` maps each path to how far the file was read, and is updated in place.
        """
        self._roots, self._left_out, self._since = tuple(roots), left_out, since
        self.positions, self._own_pids = positions, own_pids
        self._search_at = 0.0
        self._n_fruitless = 0
        self._of_others: set[str] = set()
        self.damaged: list[Path] = []

    def read(self, *, is_last: bool = False) -> Iterator[tuple[Path, FileValues]]:
        """Yield new values; search for new files from time to time."""
        if is_last or time.monotonic() >= self._search_at:
            began = time.monotonic()
            self._n_fruitless = 0 if self._search() else self._n_fruitless + 1
            took_s = time.monotonic() - began
            pause_s = max(OFTEN_S, PAUSE * took_s)
            if self._n_fruitless >= FRUITLESS:
                pause_s = max(SELDOM_S, LONG_PAUSE * took_s)
            self._search_at = time.monotonic() + pause_s
        left = MOST_BYTES_PER_TURN
        for name, position in self.positions.items():
            reader = reader_of(os.path.basename(name))
            if reader and left > 0 and not position.is_damaged and self._has_news(name, position):
                before = position.place
                yield from self._values(Path(name), reader, position)
                position.is_read = position.place == before
                left -= max(position.place - before, MOST_BYTES // 64)

    def _values(self, path: Path, reader: MetricsFile, position: FilePosition) -> Iterator[tuple[Path, FileValues]]:
        with contextlib.suppress(OSError):
            for values in reader(path, position):
                yield path, values
        if position.is_damaged and path.suffix != ".db":
            self.damaged.append(path)

    def _has_news(self, name: str, position: FilePosition) -> bool:
        """Return whether a file, or a database's write-ahead log, may contain more than was read."""
        size = newest = 0
        for suffix in ("", "-wal"):
            with contextlib.suppress(OSError):
                status = os.stat(name + suffix, follow_symlinks=False)
                size, newest = size + status.st_size, max(newest, status.st_mtime_ns)
        if (size, newest) == (position.size, position.mtime_ns) and position.is_read:
            return False
        if position.place > size and not name.endswith(".db"):
            position.place = 0  # The file was rewritten.
        position.size, position.mtime_ns = size, newest
        return size > 0

    def _search(self) -> bool:
        """Start following new files; return whether there are any."""
        new = [path for path in self._found() if str(path) not in self.positions and str(path) not in self._of_others]
        new = new[: max(0, MOST_FILES - len(self.positions))]
        if not new:
            return False
        identities = {path: file_identity(path) for path in new}
        others = _written_by_others({*identities.values()}, {os.getpid(), *self._own_pids()})
        for path, identity in identities.items():
            if identity in others:
                self._of_others.add(str(path))
            elif identity:
                self.positions[str(path)] = FilePosition(self._since)
        return True

    def _found(self) -> Iterator[Path]:
        """Yield the files written since the start, nearest to the roots first, without following links."""
        deadline = time.monotonic() + SEARCH_S
        folders = deque((root, 0) for root in dict.fromkeys(self._roots))
        while folders and time.monotonic() < deadline:
            folder, depth = folders.popleft()
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                for entry in entries:
                    if reader_of(entry.name) and self._is_new(entry):
                        yield Path(entry.path)
                    elif depth < DEEPEST and self._is_searched(entry):
                        folders.append((Path(entry.path), depth + 1))
                    if time.monotonic() > deadline:
                        return

    def _is_new(self, entry: os.DirEntry[str]) -> bool:
        status = entry.stat(follow_symlinks=False)
        return stat.S_ISREG(status.st_mode) and status.st_mtime >= self._since - _CLOCK_S

    def _is_searched(self, entry: os.DirEntry[str]) -> bool:
        is_hidden = entry.name.startswith(".") or entry.name in _SKIPPED
        return not is_hidden and entry.is_dir(follow_symlinks=False) and Path(entry.path) != self._left_out


def _written_by_others(files: set[tuple[int, int] | None], own: set[int]) -> set[tuple[int, int]]:
    """Return which of these files, given by device and inode, another of this user's processes has open for writing."""
    written = set()
    for pid in os.listdir("/proc"):
        if pid.isdecimal() and int(pid) not in own:
            with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:
                for entry in entries:
                    with contextlib.suppress(OSError, StopIteration, ValueError):
                        identity = file_identity(Path(entry.path))
                        if identity in files and identity and _is_for_writing(pid, entry.name):
                            written.add(identity)
    return written


def _is_for_writing(pid: str, descriptor: str) -> bool:
    info = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
    flags = next(line for line in info.splitlines() if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY

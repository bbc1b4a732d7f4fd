"""The processes of an extraction, each of which reads its own contexts: what they tell each other, by files.

They meet only at the start and the end, hours apart, for which connections between processes are not made.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer.contract.files import write_whole
from trainer.contract.json_file import read_json
from trainer.contract.paths import private_folder

POLL_S = 0.1
# Seconds between two reports of how many rows a process has.
TELL_EVERY_S = 0.5


class Stopped(Exception):
    """The extraction is to stop while this process waits for others."""


class Alone:
    """One process that extracts everything; `advance(n)` is told how many rows are kept so far."""

    rank, size = 0, 1

    def __init__(self, stop: threading.Event, advance: Callable[[int], object] = lambda n: None) -> None:
        self._stop, self._advance = stop, advance

    @property
    def is_stopped(self) -> bool:
        """Whether to stop: after the batch that is being read."""
        return self._stop.is_set()

    def begin(self, prepare: Callable[[], object]) -> None:
        """Call `prepare` in rank 0, and return in all ranks when that is done."""
        prepare()

    def kept(self, n: int) -> None:
        """Tell how many rows of this rank are kept."""
        self._advance(n)

    def extra(self, lacking: int) -> int:
        """Tell how many rows this rank lacks of its share, as its text has ended; return how many others leave to it.

        What is lacking is left to the first ranks that have text, one after the other.
        """
        return 0

    def end(self, given: int, n_read: int) -> int:
        """Tell how many rows beyond its share this rank has and how many tokens it has read; return those of all."""
        return n_read


class Peers(Alone):
    """One of several processes, which all see the folder; a new one each time that they are started."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        size: int,
        stop: threading.Event,
        advance: Callable[[int], object] = lambda n: None,
    ) -> None:
        super().__init__(stop, advance)
        self.rank, self.size = rank, size
        self._folder = private_folder(folder)
        self._told_at, self._n_kept = 0.0, 0

    @property
    def is_stopped(self) -> bool:
        # Requests reach rank 0 alone.
        if self.rank == 0 and self._stop.is_set() and not self._read("stopped"):
            self._write("stopped", 1)
        return self._stop.is_set() or self._read("stopped") is not None

    def begin(self, prepare: Callable[[], object]) -> None:
        if self.rank == 0:
            prepare()
            self._write("begun", 1)
        else:
            self._await("begun")

    def kept(self, n: int) -> None:
        self._n_kept = n
        if (now := time.monotonic()) < self._told_at + TELL_EVERY_S:
            return
        self._told_at = now
        # Where the disk is full, the next shard will tell.
        with contextlib.suppress(OSError):
            self._write(f"kept-{self.rank}", n, durable=False)
        self._advance(self._sum_kept() if self.rank == 0 else n)

    def extra(self, lacking: int) -> int:
        self._write(f"lacking-{self.rank}", lacking)
        of_ranks = [self._await(f"lacking-{rank}") for rank in range(self.size)]
        left = sum(of_ranks)
        if lacking or not left:
            return 0
        for rank in range(self.rank):
            left -= 0 if of_ranks[rank] else self._await(f"given-{rank}")
        return left

    def end(self, given: int, n_read: int) -> int:
        self._write(f"given-{self.rank}", given)
        self._write(f"kept-{self.rank}", self._n_kept)
        self._write(f"ended-{self.rank}", n_read)
        return n_read if self.rank else sum(self._await(f"ended-{rank}") for rank in range(self.size))

    def _sum_kept(self) -> int:
        others = (self._read(f"kept-{rank}") or 0 for rank in range(self.size) if rank != self.rank)
        return self._n_kept + sum(others)

    def _await(self, name: str) -> int:
        """Wait for what another rank tells; raise `Stopped` where the extraction is to stop before."""
        while (value := self._read(name)) is None:
            if self.is_stopped:
                raise Stopped
            if self.rank == 0:
                self._advance(self._sum_kept())
            time.sleep(POLL_S)
        return value

    def _read(self, name: str) -> int | None:
        return read_json(self._folder / name, int)

    def _write(self, name: str, value: int, *, durable: bool = True) -> None:
        write_whole(self._folder / name, str(value), durable=durable)

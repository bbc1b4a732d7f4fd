"""Exchanges counts between an extraction's processes through files.

Each process reads its own contexts. The processes synchronise only at the start and at the end, which are hours apart.
They use files because network connections between processes are not designed to stay idle for that long.
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
# The minimum time between two reports of a process's row count, in seconds.
TELL_EVERY_S = 0.5


class PeersStopped(Exception):
    """Raised if a stop is requested while this process is waiting for other processes."""


class Alone:
    """A single process that extracts all rows; it calls `advance(n)` with the current number of kept rows."""

    rank, size = 0, 1

    def __init__(self, stop: threading.Event, advance: Callable[[int], object] = lambda n: None) -> None:
        self._stop, self._advance = stop, advance

    @property
    def is_stopped(self) -> bool:
        """Whether the process should stop after the current batch."""
        return self._stop.is_set()

    def begin(self, prepare: Callable[[], object], name: str = "begun") -> None:
        """Call `prepare` on rank 0; all ranks return once the call is complete. Each call needs its own name."""
        prepare()

    def kept(self, n: int) -> None:
        """Report the number of rows that this rank has kept."""
        self._advance(n)

    def extra(self, lacking: int) -> int:
        """Report how many rows this rank's share lacks, and return how many rows it must add for other ranks.

        A rank lacks rows if it has run out of text. The first rank that still has text adds as many of the missing rows
        as it can, then the next rank with text, and so on.
        """
        return 0

    def end(self, given: int, n_read: int) -> int:
        """Report how many rows this rank has beyond its share, and how many tokens it has read.

        Rank 0 waits for all ranks and returns the total number of tokens read. The other ranks return their own token
        counts.
        """
        return n_read


class Peers(Alone):
    """One of several processes that communicate through a folder; each start of an extraction uses a new folder."""

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
        self._reported_at, self._n_kept = 0.0, 0

    @property
    def is_stopped(self) -> bool:
        # Only rank 0 receives stop requests.
        if self.rank == 0 and self._stop.is_set() and not self._read("stopped"):
            self._write("stopped", 1)
        return self._stop.is_set() or self._read("stopped") is not None

    def begin(self, prepare: Callable[[], object], name: str = "begun") -> None:
        if self.rank == 0:
            prepare()
            self._write(name, 1)
        else:
            self._await(name)

    def kept(self, n: int) -> None:
        self._n_kept = n
        if (now := time.monotonic()) < self._reported_at + TELL_EVERY_S:
            return
        self._reported_at = now
        # If the disk is full, writing the next shard will report the error.
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
        """Wait until a rank has written the value `name`; return it, or raise `PeersStopped` if a stop is requested."""
        while (value := self._read(name)) is None:
            if self.is_stopped:
                raise PeersStopped
            if self.rank == 0:
                self._advance(self._sum_kept())
            time.sleep(POLL_S)
        return value

    def _read(self, name: str) -> int | None:
        return read_json(self._folder / name, int)

    def _write(self, name: str, value: int, *, durable: bool = True) -> None:
        write_whole(self._folder / name, str(value), durable=durable)

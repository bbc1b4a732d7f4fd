"""Uses the utilisation history to find GPUs that a job holds but does not use, and jobs that use none of their GPUs."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

import msgspec

from sae_tui.gpu.stored import last_busy
from sae_tui.jobs.gpus.availability import Holders
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.rows import Job
from trainer.contract.wording import duration

# A GPU is idle for seconds while its job saves or evaluates, and for up to a minute while it reads from a slow disk.
IDLE_AFTER_S = 600.0
# How often a supervisor checks whether its job uses its GPUs. The history contains one maximum per minute.
CHECK_EVERY_S = 60.0


def with_idle(held: Holders, data: DataDir) -> Holders:
    """Add a description of how long each held GPU has been idle; this takes about 1 ms per GPU."""
    idle = {}
    for uuid, lease in held.leases.items():
        with contextlib.suppress(UserError):
            if words := _words(data, lease.gpu_index, uuid, lease.since):
                idle[uuid] = words
    return msgspec.structs.replace(held, idle=idle) if idle else held


def _words(data: DataDir, index: int, uuid: str, since: float) -> str:
    now = time.time()
    if now - since < IDLE_AFTER_S:
        return ""
    busy_at = last_busy(data.gpu_db, socket.gethostname(), index, uuid, since)
    if busy_at is None or now - busy_at < IDLE_AFTER_S:
        return ""
    return f"held {duration(now - since)}, idle for {duration(now - busy_at)}"


class IdleWatch:
    """Tracks how long a job has used none of its GPUs; a clock that jumps never makes a job appear idle."""

    def __init__(self, data: DataDir, job: Job, steady: Callable[[], float] = time.monotonic) -> None:
        """Start now; `steady` is a clock that never jumps."""
        self._data, self._steady = data, steady
        self._gpus = tuple(zip(job.gpu_ids, job.gpu_uuids, strict=False))
        self._since = time.time()
        self._due, self._busy_at = steady() + CHECK_EVERY_S, steady()

    def turn(self) -> float | None:
        """Return how many seconds ago the job last used a GPU, or None if unknown or checked less than a minute ago."""
        now = self._steady()
        if now < self._due or not self._gpus:
            return None
        self._due = now + CHECK_EVERY_S
        idle_s = self._stored_idle_s()
        # The stored times may jump, but the job cannot have been idle since before it was last seen busy.
        self._busy_at = now if idle_s is None else max(self._busy_at, now - max(0.0, idle_s))
        return None if idle_s is None else now - self._busy_at

    def _stored_idle_s(self) -> float | None:
        """Return the time since the job last used a GPU according to the history, or None if a GPU's use is unknown."""
        host, now = socket.gethostname(), time.time()
        idle_s = None
        for index, uuid in self._gpus:
            with contextlib.suppress(UserError):
                busy_at = last_busy(self._data.gpu_db, host, index, uuid, self._since)
                if busy_at is not None:
                    idle_s = min(now - busy_at, idle_s if idle_s is not None else now - busy_at)
                    continue
            return None
        return idle_s

"""Finds GPUs held but not used by a job, based on their stored utilisation history."""

from __future__ import annotations

import contextlib
import socket
import time

import msgspec

from sae_tui.gpu.stored import last_busy
from sae_tui.jobs.gpus.availability import Holders
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.wording import duration

# A GPU is idle for seconds while its job saves or evaluates, and for up to a minute while it reads from a slow disk.
IDLE_AFTER_S = 600.0


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

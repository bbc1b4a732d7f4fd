"""Tracks which GPUs on this machine our jobs hold, and creates GPU sources.

All functions and methods can be called from any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping

from sae_tui.gpu import load_source
from sae_tui.gpu.base import GpuSource
from sae_tui.jobs.gpus.availability import Holders, holders
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.store.follower import StoreFollower
from trainer.contract.store.job_store import Control


class Occupancy:
    """Tracks the GPU leases in the store; a query takes 20 µs if the store has not changed."""

    def __init__(self, data: DataDir) -> None:
        self._lock = threading.Lock()
        self._follower = StoreFollower(data.control_db, lambda path: Control(path, readonly=True))
        self._holders = Holders()

    def holders(self) -> Holders:
        """Return the holders of all GPUs; if the store cannot be read now, return the last known holders."""
        with self._lock:
            with contextlib.suppress(UserError):
                self._follower.poll(self._read)
            return self._holders

    def jobs_by_uuid(self) -> Mapping[str, int]:
        """Return a dict mapping the UUID of each held GPU to its job's id."""
        return {uuid: job.id for uuid, job in self.holders().jobs.items()}

    def processes_by_uuid(self) -> Mapping[str, tuple[int, int]]:
        """Return a dict mapping the UUID of each GPU with a rank to the rank's pid and estimated memory in bytes.

        Simulated GPUs list these ranks as their processes.
        """
        # Import this late, because only simulated GPUs need it and importing the settings takes time.
        from trainer.contract.planning.memory import CUDA_CONTEXT_BYTES

        held = self.holders()
        needs = {uuid: job.card_memory_bytes or CUDA_CONTEXT_BYTES for uuid, job in held.jobs.items()}
        return {uuid: (pid, needs[uuid]) for uuid, pid in held.pids.items()}

    def _read(self, control: Control | None) -> None:
        if control is None:
            self._holders = Holders()
            return
        jobs = control.active_jobs()
        ranks = [rank for job in jobs for rank in control.ranks(job.id)]
        self._holders = holders(jobs, control.leases(), ranks)


def gpu_source(name: str, occupancy: Occupancy, *, count: int | None = None) -> GpuSource:
    """Return the GPU source with this name, which must be one of `source_names`.

    Simulated GPUs list our jobs' ranks as their processes. The number of simulated GPUs is `count` or, if `count`
    is None, the number in the name, as in "simulated:8".
    """
    name, _, named = name.partition(":")
    if name != "simulated":
        return load_source(name)
    n_gpus = count or (int(named) if named else None)
    return load_source(name, occupied=occupancy.processes_by_uuid, **({"count": n_gpus} if n_gpus else {}))


def name_elsewhere(name: str, n_gpus: int) -> str:
    """Return a name that another process can use to open a source with the same GPUs."""
    return f"{name}:{n_gpus}" if name == "simulated" and n_gpus else name

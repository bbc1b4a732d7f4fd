"""What our jobs hold on this machine's GPUs, for every thread that asks, and the GPU source that knows it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from sae_tui.gpu import load_source
from sae_tui.gpu.base import GpuSource
from sae_tui.jobs.cards.availability import Holders, holders
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir
from trainer.contract.planning.memory import CUDA_CONTEXT_BYTES
from trainer.contract.store.job_store import Control


class Occupancy:
    """Follows the leases in the store; a question costs 20 µs while nothing changes."""

    def __init__(self, data: DataDir) -> None:
        self._path = data.control_db
        self._lock = threading.Lock()
        self._control: Control | None = None
        self._version: tuple[int, int] | None = None
        self._holders = Holders()

    def holders(self) -> Holders:
        """Return who holds what; as last known where the store cannot be read just now."""
        with self._lock:
            try:
                self._read()
            except UserError:
                self._close()
            return self._holders

    def jobs_by_uuid(self) -> Mapping[str, int]:
        """Return the id of the job on each GPU."""
        return {uuid: job.id for uuid, job in self.holders().jobs.items()}

    def processes_by_uuid(self) -> Mapping[str, tuple[int, int]]:
        """Return pid and estimated bytes of the rank on each GPU, which simulated cards show as theirs."""
        held = self.holders()
        needs = {uuid: job.card_memory_bytes or CUDA_CONTEXT_BYTES for uuid, job in held.jobs.items()}
        return {uuid: (pid, needs[uuid]) for uuid, pid in held.pids.items()}

    def _read(self) -> None:
        if not self._path.exists():
            self._close()
            self._holders = Holders()
            return
        if self._control is None:
            self._control = Control(self._path, readonly=True)
        version = self._control.version()
        if version != self._version:
            jobs = self._control.active_jobs()
            ranks = [rank for job in jobs for rank in self._control.ranks(job.id)]
            self._holders = holders(jobs, self._control.leases(), ranks)
            self._version = version

    def _close(self) -> None:
        if self._control:
            self._control.close()
        self._control = self._version = None


def gpu_source(name: str, occupancy: Occupancy, *, count: int | None = None) -> GpuSource:
    """Return the source of this name, one of `source_names`; simulated cards show our jobs' ranks.

    There are `count` of those, or as many as the name says: "simulated:8".
    """
    name, _, named = name.partition(":")
    if name != "simulated":
        return load_source(name)
    n_cards = count or (int(named) if named else None)
    return load_source(name, occupied=occupancy.processes_by_uuid, **({"count": n_cards} if n_cards else {}))


def reopened_as(name: str, n_cards: int) -> str:
    """Return the name under which another process finds the same cards."""
    return f"{name}:{n_cards}" if name == "simulated" and n_cards else name

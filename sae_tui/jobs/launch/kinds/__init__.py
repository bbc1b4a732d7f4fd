"""Determines, for each kind of job, what the app shows and records when a job is launched.

The kinds of job are listed by `KINDS` in the contract's catalog.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, TypeVar

from sae_tui.jobs.launch.memory_need import FreeMemory, Need, PeakMemory
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.launch.ways import Way, row_of
from sae_tui.jobs.program_environment import snapshot
from trainer.contract.errors import errors
from trainer.contract.paths import DataDir
from trainer.contract.planning.check_job import Machine, MachineGpu, proposal_class, propose
from trainer.contract.planning.outlook import AnyOutlook
from trainer.contract.settings.catalog import KINDS
from trainer.contract.settings.job import J
from trainer.contract.store.rows import Job
from trainer.contract.wording import gibibytes, plural

L = TypeVar("L", bound=AnyOutlook)


class LaunchKind(Generic[J, L]):
    """Produces the summary, the memory requirement and the store row for one kind of job.

    The default implementations suit a kind of job whose requirements are unknown.
    """

    # The heading above the settings in the launch form.
    heading = "Settings"

    def needs(self, look: L, measured: PeakMemory | None = None) -> str:
        """Describe the job's requirements, like `needs 8.2 GB on each of 3 GPUs`."""
        return f"needs {gibibytes(look.needs_bytes)}" if look.needs_bytes else "memory unknown"

    def summary(self, job: J, look: L, *, device: str, past: Iterable[Job]) -> str:
        """Return one line about the job's devices and requirements."""
        return f"{plural(look.ranks, 'GPU' if look.on_gpus else 'CPU process')} · {self.needs(look)}"

    def seconds(self, job: J, look: L, *, device: str, past: Iterable[Job]) -> float | None:
        """Return how long the job will take, or None if that is unknown."""
        return None

    def ways(self, job: J, on: Machine, gpus: Sequence[MachineGpu], counts: Iterable[int]) -> list[Way]:
        """Forecast the job on the first 1, 2, … of these GPUs, for each number in `counts`.

        If the job's duration is unknown, forecast it on only one GPU, because the benefit of more GPUs is unknown.
        """
        fitting = propose(job.replace("launch", gpus=[gpus[0].index]), on)
        return [row_of(fitting.outlook, gpus[:1], 1.0, fits=not errors(fitting.memory_problems()))]

    def answer(self, look: L) -> dict[str, object]:
        """Return the additional fields reported by `sae-tui validate --json` for this kind of job."""
        return {}

    def measured(self, job: J, look: L, device: str, past: Iterable[Job]) -> PeakMemory | None:
        """Return the peak memory used by a finished job of the same shape, or None if there is no such job."""
        return None

    def need(
        self, job: J, look: L, free: FreeMemory, *, device: Literal["cuda", "cpu"], past: Iterable[Job] = ()
    ) -> Need | None:
        """Return the memory needed by each rank, by component, or None if it is unknown.

        If `free` is too small, the result includes remedies. `device` is the ranks' device, which is "cpu" for
        simulated GPUs.
        """
        return None

    def in_array(self, job: J, array: int) -> J:
        """Return an array's job with the array's id added; the id is known only once the first job is recorded."""
        return job

    def write_files(self, data: DataDir, row: Job, job: J) -> None:
        """Write the files that the job needs in its run folder, in addition to the job file.

        Also store this process's environment, so that the supervisor gets it even if another process starts the
        supervisor.
        """
        snapshot().write(data.run(row.id))

    def row(self, data: DataDir, job: J, placement: Placement, past: Iterable[Job]) -> dict[str, Any]:
        """Return the job row columns that differ between kinds of job."""
        steps = proposal_class(job).total_steps(job, placement.world_size)
        return {"total_steps": steps or None, "mode": placement.look.mode if placement.look else "single"}


def launch_kind(kind: str) -> LaunchKind[Any, Any]:
    """Return the `LaunchKind` for a kind of job."""
    loaded: type[LaunchKind[Any, Any]] = pkgutil.resolve_name(KINDS[kind].launch)
    return loaded()

"""Describes a command job's launch: a summary, the required memory, and the environment stored for the program."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sae_tui.gpu.secrets import masked_arguments
from sae_tui.jobs.launch.kinds import LaunchKind
from sae_tui.jobs.launch.memory_need import PeakMemory
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.program_environment import ProgramEnvironment, snapshot
from trainer.contract.paths import DataDir
from trainer.contract.planning.command import CommandOutlook
from trainer.contract.printable import printable
from trainer.contract.settings.command import CommandJob, name_of
from trainer.contract.settings.job import J
from trainer.contract.settings.job_file import parse_as
from trainer.contract.settings.toml import table_of
from trainer.contract.store.rows import Job
from trainer.contract.wording import gibibytes, plural

# The environment variables that contain the array's id and the job's index, for a program in an array.
ARRAY_ID, ARRAY_INDEX = "SAE_TUI_ARRAY_ID", "SAE_TUI_ARRAY_INDEX"


def name_of_command(argv: Sequence[str]) -> str:
    """Return a job name derived from a command line, without secrets or control characters."""
    return printable(name_of(masked_arguments(argv)))


def with_own_name(job: J) -> J:
    """Name an unnamed command job after its command line, because jobs that are all called "command" look alike."""
    if not isinstance(job, CommandJob) or job.name != CommandJob.kind:
        return job
    return msgspec.structs.replace(job, name=name_of_command(job.command.argv))


class LaunchCommand(LaunchKind[CommandJob, CommandOutlook]):
    """A command's launch."""

    heading = "Command"

    def needs(self, look: CommandOutlook, measured: PeakMemory | None = None) -> str:
        """Return a string like `needs 20.0 GiB on each GPU` or `memory unknown; last time 17.2 GiB (job 5)`."""
        last = f"last time {gibibytes(measured.peak_bytes)} (job {measured.job_id})" if measured else ""
        if look.needs_bytes is None:
            unknown = "memory unknown, so it gets idle GPUs" if look.on_gpus else "memory unknown"
            return "; ".join(filter(None, (unknown, last)))
        each = " on each GPU" if look.ranks > 1 else ""
        return "; ".join(filter(None, (f"needs {gibibytes(look.needs_bytes)}{each}", last)))

    def summary(self, job: CommandJob, look: CommandOutlook, *, device: str, past: Iterable[Job]) -> str:
        """Return a string like `2 GPUs · needs 20.0 GiB on each GPU · torchrun …`."""
        where = plural(look.ranks, "GPU") if look.on_gpus else "the CPU"
        return " · ".join([where, self.needs(look, self.measured(job, look, device, past)), job.command.words])

    def measured(self, job: CommandJob, look: CommandOutlook, device: str, past: Iterable[Job]) -> PeakMemory | None:
        """Return the peak GPU memory of the newest job with the same command line, folder and number of GPUs."""
        for done in past if look.on_gpus else ():
            if done.peak_memory_bytes and done.gpu_uuids and len(done.gpu_uuids) == look.ranks:
                with contextlib.suppress(ValueError):
                    other, _ = parse_as(CommandJob, table_of(done.config))
                    if other and (other.command.argv, other.command.folder) == (job.command.argv, job.command.folder):
                        return PeakMemory(done.id, done.peak_memory_bytes, "cuda")
        return None

    def in_array(self, job: CommandJob, array: int) -> CommandJob:
        """Add a variable with the array's id, which clones and resumed jobs also get."""
        return job.replace("command", env=[*(job.command.env or ()), f"{ARRAY_ID}={array}"])

    def write_files(self, data: DataDir, row: Job, job: CommandJob) -> None:
        """Store the program's environment; a resumed job keeps its own, and a clone gets its parent's."""
        paths = data.run(row.id)
        if ProgramEnvironment.read(paths) is None:
            parent = ProgramEnvironment.read(data.run(row.parent)) if row.parent else None
            (parent or snapshot(clean=job.command.clean_env)).write(paths)

    def row(self, data: DataDir, job: CommandJob, placement: Placement, past: Iterable[Job]) -> dict[str, Any]:
        needed = placement.look.needs_bytes if placement.look else placement.had_bytes
        return {"mode": "single", "card_memory_bytes": needed if placement.gpus_wanted else None}

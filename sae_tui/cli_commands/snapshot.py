"""Reads all GPUs for a command, even if the driver is slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

import msgspec

from sae_tui.cli_commands.output import output_closes_within
from sae_tui.gpu import vendor_to_name
from sae_tui.gpu.base import GpuSample, GpuSource, SourceUnavailable
from sae_tui.gpu.detailed import ReopeningSource
from sae_tui.gpu.once import close_source, open_source, read_all
from sae_tui.gpu.visible import all_hidden, count_visible, of_these, refuse_missing, visible
from sae_tui.jobs.gpus.availability import GpuChoice, choices, with_other_users
from sae_tui.jobs.gpus.idle import with_idle
from sae_tui.jobs.gpus.locks import lock_folder
from sae_tui.jobs.gpus.occupancy import Occupancy
from sae_tui.threads import warn_when_slow
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir


class Snapshot(msgspec.Struct, frozen=True):
    """Samples from all GPUs, and whether each GPU is available to a new job.

    `problem` explains why there are no samples, and `is_broken` is True if the driver must be repaired. `note` reports
    hidden GPUs.
    """

    samples: tuple[GpuSample, ...]
    choices: tuple[GpuChoice, ...]
    source_name: str
    cuda: bool
    problem: str = ""
    is_broken: bool = False
    note: str = ""

    @property
    def withheld(self) -> list[int]:
        """The indices of the GPUs reserved for other users."""
        return [choice.index for choice in self.choices if choice.withheld]

    def limited_to(self, only: Collection[int]) -> Snapshot:
        """Return the snapshot limited to the GPUs in `only` (all if empty); raise `UserError` if one does not exist."""
        if not only or not self.samples:
            return self
        refuse_missing(only, self.samples)
        choices = tuple(choice for choice in self.choices if choice.index in only)
        return msgspec.structs.replace(self, samples=of_these(self.samples, only), choices=choices)


def take(source: GpuSource, occupancy: Occupancy, data: DataDir, warn: Callable[[str], None]) -> Snapshot:
    """Read all GPUs in parallel; call `warn` with a message if the driver is slow."""
    samples: tuple[GpuSample, ...] = ()
    problem, is_broken = "", False
    try:
        with warn_when_slow(lambda: warn(f"asking the {vendor_to_name(source.name).words} driver…")):
            samples = read_all(source, open_source(source))
            close_source(source)  # do not keep the driver open, because `launch --wait` may run for days
    except SourceUnavailable as error:
        problem, is_broken = str(error), error.is_broken
    return _snapshot(source, samples, occupancy, data, problem, is_broken)


def watch(source: GpuSource, occupancy: Occupancy, data: DataDir, every_s: float) -> Iterator[Snapshot]:
    """Yield a snapshot every `every_s` seconds until the output is closed.

    Reopen the source after the driver is reloaded. Raise `UserError` if the source cannot be opened at the start.
    """
    try:
        count = open_source(source)
    except SourceUnavailable as error:
        raise UserError(str(error)) from None
    problem = ""
    while True:
        began = time.monotonic()
        yield _snapshot(source, read_all(source, count), occupancy, data, problem, bool(problem))
        if output_closes_within(every_s - (time.monotonic() - began)):
            return
        if problem or (isinstance(source, ReopeningSource) and source.must_reopen):
            close_source(source)
            try:
                count, problem = open_source(source), ""
            except SourceUnavailable as error:
                count, problem = 0, str(error)


def _snapshot(
    source: GpuSource,
    samples: tuple[GpuSample, ...],
    occupancy: Occupancy,
    data: DataDir,
    problem: str = "",
    is_broken: bool = False,
) -> Snapshot:
    n_gpus = len(samples)
    samples = visible(samples, source.name)
    if n_gpus and not samples:
        problem = all_hidden(n_gpus, source.name)
    held = with_other_users(with_idle(occupancy.holders(), data), lock_folder(data, source.name), samples)
    gpu_choices = choices(samples, held)
    note = count_visible(len(samples), n_gpus, source.name)
    return Snapshot(samples, gpu_choices, source.name, source.cuda, problem, is_broken, note)

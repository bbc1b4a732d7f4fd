"""Estimates the memory, disk space and time needed for an extraction, for the `estimate` command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.paths import box_file, working_folder
from trainer.contract.planning.check_job import Machine, MachineGpu, wanted_ranks
from trainer.contract.planning.extraction import ExtractionOutlook, ExtractionProposal, disk_words
from trainer.contract.planning.hardware import read_box
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.wording import duration
from trainer.measuring.parts_table import parts_of, table
from trainer.ranks.devices import gpus_here


class ExtractionEstimate(msgspec.Struct, frozen=True):
    """The estimated memory use on each device, and the disk space and time that the extraction needs."""

    job: ExtractJob
    outlook: ExtractionOutlook

    @classmethod
    def of(cls, job: ExtractJob) -> ExtractionEstimate:
        """Estimate an extraction on this machine; raise `JobFileError` if its model is not stored locally."""
        found = [] if job.on_cpu else gpus_here()
        gpus = tuple(gpu.as_machine_gpu for gpu in found)
        if not gpus and not job.on_cpu:
            # The job may be meant for another machine.
            gpus = tuple(MachineGpu(index, "GPU", None) for index in range(wanted_ranks(job)))
        box = box_file()
        folder = box.parent if box else working_folder()
        look = ExtractionProposal(job, Machine(gpus, 1, folder, speeds=read_box(box))).outlook
        if look.memory is None:
            raise JobFileError(
                [Problem("model.path", f"{job.model.path} was not found on this machine; download it first")]
            )
        return cls(job, look)

    def as_json(self) -> dict[str, Any]:
        """Return the output for `--json`: the memory and disk space in bytes, the time, the speed and the mode."""
        look = self.outlook
        assert look.memory
        return {
            "per_gpu": parts_of(look.memory),
            "disk_bytes": look.disk_bytes,
            "disk_free_bytes": look.disk_free_bytes,
            "seconds": look.seconds,
            "tokens_per_s": self._tokens_per_s,
            "mode": look.mode,
            "device": look.device_name,
            "is_measured": look.is_measured,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text output: the memory as a table and a bar, the disk space, and the time."""
        look = self.outlook
        assert look.memory
        yield f"per {'GPU' if look.on_gpus else 'process'}, on {look.ranks}:"
        yield from table(look.memory)
        yield f"{self.job.extract.n_tokens:,} rows of each hook take {disk_words(look)}"
        by = "speeds measured here" if look.is_measured else f"assumed speeds of a typical {look.device_name}"
        yield f"about {duration(look.seconds or 0)} ({self._tokens_per_s:,.0f} tokens/s, {look.mode}) by {by}"

    @property
    def _tokens_per_s(self) -> float:
        return self.job.extract.n_tokens / max(self.outlook.seconds or 0, 1e-9)

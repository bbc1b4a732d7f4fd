"""Describes an extraction job's launch: a summary, the required memory, disk space and time, and the job's row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from sae_tui.jobs.launch.kinds import LaunchKind
from sae_tui.jobs.launch.memory_need import FreeMemory, Need, PeakMemory
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.launch.ways import Way, compared, row_of
from trainer.contract.paths import DataDir
from trainer.contract.planning.check_job import Machine, MachineGpu, propose
from trainer.contract.planning.extraction import SPREAD, ExtractionOutlook, batch_that_fits, disk_words, mode_of
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.store.rows import Job
from trainer.contract.wording import duration, gibibytes, plural


class LaunchExtraction(LaunchKind[ExtractJob, ExtractionOutlook]):
    """An extraction job's launch."""

    heading = "Model and text"

    def needs(self, look: ExtractionOutlook, measured: PeakMemory | None = None) -> str:
        """Return a string like `needs 1.2 GiB, and 0.9 GiB of disk, 38.0 GiB free; about 12 min, estimated`."""
        if look.needs_bytes is None or look.disk_bytes is None or look.seconds is None:
            return "memory unknown: the model is not downloaded yet"
        time = duration(look.seconds)
        device = "GPU" if look.on_gpus else "process"
        each = f" per {device}" if look.ranks > 1 else ""
        return f"needs {gibibytes(look.needs_bytes)}{each}, and {disk_words(look)}; about {time}, estimated"

    def summary(self, job: ExtractJob, look: ExtractionOutlook, *, device: str = "", past: Iterable[Job] = ()) -> str:
        """Return a string like `1 GPU · 1,000,000 rows of 2 hooks, 576 wide · needs …`."""
        where = plural(look.ranks, "GPU" if look.on_gpus else "CPU process")
        where = f"one model over {where}" if look.mode == SPREAD and look.on_gpus else where
        wide = "" if look.d_in is None else f", {look.d_in:,} wide"
        rows = f"{job.extract.n_tokens:,} rows of {plural(len(job.model.hooks), 'hook')}{wide}"
        return " · ".join([where, rows, self.needs(look)])

    def seconds(self, job: ExtractJob, look: ExtractionOutlook, *, device: str, past: Iterable[Job]) -> float | None:
        return look.seconds

    def ways(self, job: ExtractJob, on: Machine, gpus: Sequence[MachineGpu], counts: Iterable[int]) -> list[Way]:
        rows = []
        for count in counts:
            look = propose(job.replace("launch", gpus=[gpu.index for gpu in gpus[:count]]), on).outlook
            assert isinstance(look, ExtractionOutlook)
            if look.seconds is None:
                return super().ways(job, on, gpus, counts)
            rows.append(row_of(look, gpus[:count], max(1e-3, look.seconds), fits=not look.excess))
        return list(compared(rows))

    def need(
        self, job: ExtractJob, look: ExtractionOutlook, free: FreeMemory, *, device: str, past: Iterable[Job] = ()
    ) -> Need | None:
        if look.memory is None:
            return None
        sharing = 1 if look.on_gpus else look.ranks
        takes = Need(look.memory, sharing=sharing, on_gpus=look.on_gpus, otherwise="a smaller model")
        if not takes.lacks(free):
            return takes
        fitting = batch_that_fits(job, (free.free_bytes or 0) // sharing, cuda=device == "cuda", n_gpus=look.ranks)
        remedies = (f"extract.batch_tokens = {fitting}",) if fitting else ()
        return msgspec.structs.replace(takes, remedies=remedies, judged_lacking=True)

    def answer(self, look: ExtractionOutlook) -> dict[str, object]:
        return {name: getattr(look, name) for name in ("disk_bytes", "disk_free_bytes", "seconds")}

    def row(self, data: DataDir, job: ExtractJob, placement: Placement, past: Iterable[Job]) -> dict[str, Any]:
        fields: dict[str, Any] = {"total_steps": job.extract.n_tokens, "mode": mode_of(job)}
        # If a job is resumed without a new estimate of its needs, keep the earlier estimates.
        if isinstance(look := placement.look, ExtractionOutlook):
            fields |= {
                "card_memory_bytes": look.needs_bytes if placement.gpus_wanted else None,
                "estimated_memory_bytes": look.needs_bytes,
                "expected_s": look.seconds,
                "d_in": look.d_in,
            }
        return fields

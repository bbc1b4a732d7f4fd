"""Memory, disk space and time that an extraction needs, estimated before its launch."""

from __future__ import annotations

import msgspec

from sae_tui.jobs.launch.memory_need import FreeMemory, Need
from trainer.contract.planning.extraction import SPREAD, ExtractionOutlook, batch_that_fits, disk_words
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.wording import duration, gibibytes, plural


def needs(look: ExtractionOutlook) -> str:
    """Return a text like `needs 1.2 GiB, and 0.9 GiB of disk, 38.0 GiB free; about 12 min, estimated`."""
    if look.needs_bytes is None or look.disk_bytes is None or look.seconds is None:
        return "memory unknown: the model is not downloaded yet"
    time = duration(look.seconds)
    device = "GPU" if look.on_gpus else "process"
    each = f" per {device}" if look.ranks > 1 else ""
    return f"needs {gibibytes(look.needs_bytes)}{each}, and {disk_words(look)}; about {time}, estimated"


def summary(job: ExtractJob, look: ExtractionOutlook) -> str:
    """Return a text like `1 GPU · 1,000,000 rows of 2 hooks, 576 wide · needs …`."""
    where = plural(look.ranks, "GPU" if look.on_gpus else "CPU process")
    where = f"one model over {where}" if look.mode == SPREAD and look.on_gpus else where
    wide = "" if look.d_in is None else f", {look.d_in:,} wide"
    rows = f"{job.extract.n_tokens:,} rows of {plural(len(job.model.hooks), 'hook')}{wide}"
    return " · ".join([where, rows, needs(look)])


def need(job: ExtractJob, look: ExtractionOutlook, capacity: FreeMemory, *, cuda: bool) -> Need | None:
    """Return the memory per rank by component, with remedies if `capacity` is too small; None for an unknown model."""
    if look.memory is None:
        return None
    sharing = 1 if look.on_gpus else look.ranks
    takes = Need(look.memory, sharing=sharing, on_gpus=look.on_gpus, otherwise="a smaller model")
    if not takes.lacks(capacity):
        return takes
    fitting = batch_that_fits(job, (capacity.free_bytes or 0) // sharing, cuda=cuda, n_gpus=look.ranks)
    remedies = (f"extract.batch_tokens = {fitting}",) if fitting else ()
    return msgspec.structs.replace(takes, remedies=remedies, judged_lacking=True)

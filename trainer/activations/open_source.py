"""Opens the activations that a job names."""

from __future__ import annotations

import msgspec

from trainer.activations.base import Source
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig


def open_source(job: JobConfig) -> Source:
    """Return the source of a job's rows, those of all its hooks side by side.

    Raise `JobFileError` where the data is not as the job says.
    """
    if len(job.hooks) > 1:
        job.data_shape()
    load = catalog.entry(catalog.SOURCES, job.data.source, "data.source").load()
    first, *others = [load(**msgspec.structs.asdict(knobs)) for knobs in job.hooks.values()]
    source: Source = first.beside(others) if others else first
    return source

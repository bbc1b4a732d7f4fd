"""Opens the activation source specified by a job."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from trainer.activations.base import IndexedSource, Source
from trainer.contract.runs.data_record import DataRecord, record_of
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape, SourceSettings


def open_source(job: JobConfig) -> Source:
    """Return the source of a job's rows, with the activations of all its hooks concatenated.

    A cross-layer transcoder reads the joined rows of all its layers as one hook.

    Raise `JobFileError` if the data does not match the job.
    """
    if len(job.hooks) > 1:
        job.data_shape()
    load = catalog.entry(catalog.SOURCES, job.data.source, "data.source").load()
    first, *others = [_open(load, settings) for settings in job.hooks.values()]
    if job.n_layers > 1:
        return first.joined(others)
    return first.beside(others) if others else first


def shape_for_saes(source: Source, job: JobConfig) -> DataShape:
    """Return the widths of the rows that a job's SAEs are trained on, and the number of rows.

    Each layer of a cross-layer transcoder is trained on its part of the joined rows.
    """
    n = job.n_layers
    return DataShape(source.d_in // n, None if source.d_out is None else source.d_out // n, source.n_tokens)


def _open(load: Callable[..., Source], settings: SourceSettings) -> Source:
    """Open a hook's rows; a crosscoder's rows are joined from several parts."""
    first, *others = [load(**msgspec.structs.asdict(part)) for part in settings.parts()]
    return first.joined(others) if others else first


def continue_from(source: Source, job: JobConfig, before: DataRecord | None) -> DataRecord:
    """Keep the row numbers of a run that was trained on `before`, and return a record of the current data.

    Rows added since then get higher numbers. Raise `JobFileError` if a shard has changed.
    """
    record = record_of(job.hooks.values(), before)
    if before and isinstance(source, IndexedSource):
        source.continue_from(before)
    return record

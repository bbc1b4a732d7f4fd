"""Opens the activation source specified by a job."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from trainer.activations.base import IndexedSource, Source
from trainer.contract.errors import UserError
from trainer.contract.object_cache import cache_limit, used_by_others
from trainer.contract.runs.data_record import DataRecord, record_of
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.sources import DataShape, ShardSettings, SourceSettings
from trainer.contract.wording import gibibytes

# The number of rows from which held-out rows and samples are chosen if shards are used in windows.
_ROWS_HELD_FROM = 655_360


def open_source(job: JobConfig) -> Source:
    """Return the source of a job's rows, with the activations of all its hooks concatenated.

    A cross-layer transcoder reads the joined rows of all its layers as one hook.

    Raise `JobFileError` if the data does not match the job.
    """
    if len(job.hooks) > 1:
        job.data_shape()
    load = catalog.entry(catalog.SOURCES, job.data.source, "data.source").load()
    first, *others = [_open(load, settings) for settings in job.hooks.values()]
    source = first.joined(others) if job.n_layers > 1 else first.beside(others) if others else first
    if isinstance(source, IndexedSource):
        _choose_window(source, job.data.settings)
    return source


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


def continue_from(
    source: Source, job: JobConfig, before: DataRecord | None, agree: Callable[[int], int] = lambda n: n
) -> DataRecord:
    """Keep the row numbers of a run that was trained on `before`, and return a record of the current data.

    Rows added since then get higher numbers. All ranks call `agree` with the number of shards that they can shuffle
    together, and get the smallest number. Raise `JobFileError` if a shard has changed.
    """
    record = record_of(job.hooks.values(), before)
    if not isinstance(source, IndexedSource):
        return record
    if before:
        source.continue_from(before)
        return record
    if source.shuffle_shards or source.caches:
        use_window(source, agree(source.shuffle_shards or len(source.shard_starts)))
    if not source.shuffle_shards:
        return record
    n = source.split_sizes[0]
    return [msgspec.structs.replace(one, split_rows=n, shuffle_shards=source.shuffle_shards) for one in record]


def _choose_window(source: IndexedSource, settings: SourceSettings) -> None:
    """Shuffle as many shards together as the job requests or as fit in the cache; raise `UserError` if none does."""
    if not isinstance(settings, ShardSettings):
        return
    n_shards = len(source.shard_starts)
    if settings.shuffle_shards is not None:
        if not n_shards:
            message = f"{source.place} cannot be used in windows, only the shards of one folder; leave it out"
            raise UserError(f"data.shuffle_shards: {message}")
        use_window(source, settings.shuffle_shards)
        return
    if not source.caches:
        return
    size, taken = sum(cache.n_bytes for cache in source.caches), used_by_others(source.caches)
    limit = max(0, cache_limit(settings.cache_gb) - taken)
    if size <= limit:
        return
    others = f", next to {gibibytes(taken)} for other jobs" if taken else ""
    sizes = f"the shards of {source.place} take {gibibytes(size)}, and the cache may take {gibibytes(limit)}{others}"
    if not n_shards:
        raise UserError(f"data.cache_gb: {sizes}; only the shards of one folder can be used in turn, so raise it")
    # The cache keeps the current window, the next window, and the shards with held-out rows.
    n_fit = (limit - sum(cache.n_bytes_beside for cache in source.caches)) * n_shards // size
    if n_fit < 3:
        raise UserError(f"data.cache_gb: {sizes}, but at least three shards must fit; raise it, or free some space")
    # By default, the next job with other data finds room for its windows; `cache_gb` is meant for this job.
    use_window(source, max(1, n_fit * 2 // 5 if settings.cache_gb else n_fit // 5))


def use_window(source: IndexedSource, n: int) -> None:
    """Shuffle the rows of n shards together, and hold out rows of the first shards; do nothing if n is all shards."""
    starts = [*source.shard_starts, source.n_tokens]
    if not 0 < n < len(starts) - 1:
        return
    n_first = next((i for i, start in enumerate(starts) if start >= _ROWS_HELD_FROM), len(starts) - 1)
    source.use_window(n, starts[max(1, min(n_first, n // 2))])

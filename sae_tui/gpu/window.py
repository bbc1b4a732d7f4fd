"""Reads GPU history in a given number of columns: a GPU's latest intervals, or a stored span for any number of GPUs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.past import BLANK, RecentHistory, Slot
from sae_tui.gpu.ring import reading_of
from sae_tui.gpu.stored import MINUTE_S, stored_samples

FIELDS = ("utilization", "memory_used_bytes", "power_w", "temperature_c")
# The time spans, in seconds, that can be shown in addition to the latest intervals.
SPANS_S = (300, 900, 3600, 6 * 3600, 86_400, 7 * 86_400)
# For longer spans, minute means are read, as there are sixty times fewer of them than samples.
_MINUTES_FROM_S = 3600


@dataclass(frozen=True, slots=True)
class Window:
    """A GPU's history in columns of `step_s` seconds each; the first column starts at `begin`.

    `columns` maps each field to its values, one per column, with None for unknown values. `jobs` contains the id of the
    job running in each column.
    """

    begin: float
    step_s: float
    columns: Mapping[str, Sequence[float | None]]
    jobs: Sequence[int | None]

    @property
    def end(self) -> float:
        return self.begin + self.step_s * len(self.jobs)

    def time_of(self, column: float) -> float:
        """Return a column's start time in seconds since the epoch."""
        return self.begin + self.step_s * column


def live_window(past: RecentHistory, index: int, n: int, interval_s: float, job: int | None) -> Window:
    """Return a GPU's latest `n` intervals; `job` is the id of the job currently running on the GPU."""
    columns = {name: past.column(index, name, n) for name in FIELDS}
    length = max(map(len, columns.values()), default=0)
    begin = (math.floor(time.time() / interval_s) + 1 - length) * interval_s
    return Window(begin, interval_s, columns, [job if column == length - 1 else None for column in range(length)])


def stored_window(path: Path, host: str, uuid: str, span_s: float, n: int, now: float) -> Window:
    """Return a GPU's stored history for the last `span_s` seconds, in at most `n` columns.

    Missing values are None. Raise `UserError` if the store cannot be read.
    """
    first, length, step = _columns(span_s, n, now)
    columns: dict[str, list[float | None]] = {name: [None] * length for name in FIELDS}
    jobs: list[int | None] = [None] * length
    for row in stored_samples(path, host, first * step, uuid=uuid, step_s=step) if path.exists() else ():
        place = int(row.timestamp // step) - first
        if 0 <= place < length:
            jobs[place] = row.job_id
            for name in FIELDS:
                columns[name][place] = getattr(row, name)
    return Window(first * step, step, columns, jobs)


def stored_past(
    path: Path, host: str, samples: Sequence[GpuSample], span_s: float, n: int, now: float
) -> RecentHistory:
    """Return the stored history of the GPUs in `samples` for the last `span_s` seconds, in at most `n` columns.

    Raise `UserError` if the store cannot be read.
    """
    first, length, step = _columns(span_s, n, now)
    slots: dict[str, list[Slot]] = {sample.uuid: [BLANK] * length for sample in samples}
    for row in stored_samples(path, host, first * step, step_s=step) if path.exists() else ():
        place = int(row.timestamp // step) - first
        if row.gpu_uuid in slots and 0 <= place < length:
            slots[row.gpu_uuid][place] = reading_of(row)
    return RecentHistory(
        slots={sample.index: slots[sample.uuid] for sample in samples},
        power_limits_w={sample.index: sample.power_limit_w for sample in samples},
        is_period=True,
    )


def _columns(span_s: float, n: int, now: float) -> tuple[int, int, int]:
    """Return the number of the first column, the number of columns, and the seconds per column."""
    step = max(1, math.ceil(span_s / max(1, n)))
    if span_s > _MINUTES_FROM_S:
        step = math.ceil(step / MINUTE_S) * MINUTE_S
    length = max(1, math.ceil(span_s / step))
    return math.floor(now / step) - length + 1, length, step

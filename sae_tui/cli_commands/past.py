"""Streams stored history row by row for `sae-tui metrics --since`: rows for one GPU, or totals over all GPUs."""

from __future__ import annotations

import argparse
import csv
import io
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import msgspec

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import UNKNOWN, clock_time
from sae_tui.gpu.base import PUBLIC
from sae_tui.gpu.sensors import public_values
from sae_tui.gpu.simulated import is_simulated
from sae_tui.gpu.stored import STORED, GpuTotals, StoredSample, stored_samples, totals
from trainer.contract.errors import JobFileError, Problem
from trainer.contract.printable import printable
from trainer.contract.store.database import StoreMissing
from trainer.contract.wording import duration, gibibytes

# The maximum number of rows in a printed history, and the possible steps in seconds. Each step divides the next.
MOST_LINES = 60
STEPS_S = (5, 10, 30, 60, 300, 600, 1800, 3600, 3 * 3600, 6 * 3600, 86400, 7 * 86400, 28 * 86400)
CARD_LINE = "{:<19}  {:>5}  {:>9}  {:>6}  {:>7}  {:>4}"
TOTAL_LINE = "{:<19}  {:>8}  {:>5}  {:>21}  {:>6}  {:>7}"


class StoredSamples:
    """The samples from the period given by `--since`; `every_s` is the step in seconds, or None for raw samples."""

    def __init__(self, context: CommandContext, flags: argparse.Namespace) -> None:
        self.begin = time.time() - flags.since
        samples = (context.as_json or flags.csv) and flags.view == "per_gpu"
        asked_s: int | None = flags.every
        self.every_s = asked_s or (None if samples else _step(flags.since, context.settings.sampling_interval_s))
        self._path = context.data.gpu_db
        self._simulated = context.gpus.source_name == "simulated"
        self._count = len(context.gpus.samples)

    def of(self, uuid: str) -> Iterator[StoredSample]:
        """Yield the samples from one GPU, regardless of its index at the time."""
        with suppress(StoreMissing):
            yield from stored_samples(self._path, socket.gethostname(), self.begin, uuid=uuid, step_s=self.every_s)

    def of_all(self) -> Iterator[GpuTotals]:
        """Yield the totals over all GPUs present at each time. Real and simulated GPUs are never combined."""
        with suppress(StoreMissing):
            rows = stored_samples(self._path, socket.gethostname(), self.begin, step_s=self.every_s)
            yield from totals(row for row in rows if is_simulated(row.gpu_uuid) is self._simulated)

    def gpu_objects(self, uuid: str) -> Iterator[dict[str, Any]]:
        return (
            {
                "timestamp": row.timestamp,
                "samples": row.samples,
                **{PUBLIC[name]: getattr(row, name) for name in STORED},
                "job_id": row.job_id,
            }
            for row in self.of(uuid)
        )

    def total_objects(self) -> Iterator[dict[str, Any]]:
        return (
            {
                "timestamp": row.timestamp,
                "gpu_count": self._gpus_then(row),
                "gpus_counted": row.gpus_counted,
                **public_values(row),
            }
            for row in self.of_all()
        )

    def card_lines(self, index: int, uuid: str) -> Iterator[str]:
        return self._table(
            f"GPU {index}",
            CARD_LINE.format("TIME", "UTIL", "MEMORY", "TEMP", "POWER", "JOB"),
            (
                CARD_LINE.format(
                    clock_time(row.timestamp),
                    _with_unit(row.utilization, "%"),
                    _memory(row.memory_used_bytes),
                    _with_unit(row.temperature_c, " °C"),
                    _with_unit(row.power_w, " W"),
                    UNKNOWN if row.job_id is None else row.job_id,
                )
                for row in self.of(uuid)
            ),
        )

    def total_lines(self) -> Iterator[str]:
        return self._table(
            "All GPUs",
            TOTAL_LINE.format("TIME", "GPUS", "UTIL", "MEMORY", "TEMP", "POWER"),
            (
                TOTAL_LINE.format(
                    clock_time(row.timestamp),
                    f"{row.gpus_counted} of {self._gpus_then(row)}",
                    _with_unit(row.average_utilization, "%"),
                    f"{_memory(row.total_memory_used_bytes)} / {_memory(row.total_memory_total_bytes)}",
                    _with_unit(row.max_temperature_c, " °C"),
                    _with_unit(row.total_power_w, " W"),
                )
                for row in self.of_all()
            ),
        )

    def _gpus_then(self, row: GpuTotals) -> int:
        """Return the current number of GPUs, or the number at the row's time if that is larger."""
        return max(self._count, row.gpus_counted)

    def _table(self, whose: str, headings: str, lines: Iterator[str]) -> Iterator[str]:
        yield ""
        first = next(lines, None)
        if first is None:
            yield f"{whose}: no stored samples since {clock_time(self.begin)}"
            return
        yield f"{whose}: means over {duration(self.every_s or 0)}"
        yield headings
        yield first
        yield from lines


def past_of(context: CommandContext, flags: argparse.Namespace) -> StoredSamples | None:
    """Return the history, or None if not requested; raise `JobFileError` for `--every` or `--csv` without `--since`."""
    if flags.since is not None:
        return StoredSamples(context, flags)
    if flags.every is not None:
        message = "needs --since; add for example --since 24h"
        raise JobFileError([Problem("--every", message)])
    if flags.csv:
        raise JobFileError([Problem("--csv", "needs --since; add for example --since 24h")])
    return None


def csv_lines(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a CSV table, header first, while the rows are read; yield nothing if there are no rows."""
    for number, row in enumerate(rows):
        if number == 0:
            yield _csv_line(row)
        yield _csv_line(row.values())


def _csv_line(values: Iterable[object]) -> str:
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(
        printable(value) if isinstance(value, str) else value for value in values
    )
    return line.getvalue()


def object_lines(fields: dict[str, Any], history: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a JSON object ending in the field `history`, one line per row, while the rows are read."""
    head = msgspec.json.format(msgspec.json.encode(fields), indent=2).decode().removesuffix("\n}")
    yield from f'{head},\n  "history": ['.split("\n")
    yield from (f"    {line}" for line in comma_separated(msgspec.json.encode(row).decode() for row in history))
    yield "  ]"
    yield "}"


def array_lines(objects: Iterable[Iterable[str]]) -> Iterator[str]:
    """Yield the lines of a JSON array of objects; each object is passed as a sequence of lines."""
    yield "["
    for position, lines in enumerate(objects):
        if position:
            yield "  ,"
        yield from (f"  {line}" for line in lines)
    yield "]"


def comma_separated(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines with a comma after every line but the last, which is detected by reading one line ahead."""
    held: str | None = None
    for line in lines:
        if held is not None:
            yield f"{held},"
        held = line
    if held is not None:
        yield held


def _step(since_s: float, interval_s: float) -> int:
    """Return the shortest step in seconds that yields at most `MOST_LINES` rows, each from at least two samples."""
    least = max(since_s / MOST_LINES, 2 * interval_s)
    return next((step for step in STEPS_S if step >= least), STEPS_S[-1])


def _with_unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def _memory(n_bytes: int | None) -> str:
    return UNKNOWN if n_bytes is None else gibibytes(n_bytes)

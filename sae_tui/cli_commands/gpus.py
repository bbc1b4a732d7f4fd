"""`sae-tui gpus | metrics | recommend`: shows GPU activity and recommends GPUs for a job."""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import UNKNOWN, clock_time, say, show_fields, show_json, show_table, warn
from sae_tui.cli_commands.snapshot import Snapshot
from sae_tui.gpu.base import PUBLIC, Condition, GpuSample, columns
from sae_tui.gpu.sensors import Sensor, exported, public_values
from sae_tui.gpu.visible import ranges
from sae_tui.jobs.gpus.availability import GpuChoice
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.wording import gibibytes

WATCH_S = 1.0


def show_gpus(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print all GPUs as a list, or the requested GPU as an object; return 1 if the driver is broken."""
    if flags.watch:
        return _watch(context, flags)
    if context.has_broken_driver():
        return Exit.FAILED
    return _show(context.gpus, context, flags)


def _watch(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the GPUs every second until interrupted or until the output is closed."""
    problem = ""
    for snapshot in context.watch_gpus(WATCH_S):
        rows = [row for row in gpu_rows(snapshot) if flags.index in (None, row["index"])]
        if snapshot.problem not in ("", problem):
            warn(snapshot.problem)
        problem = snapshot.problem
        if not rows and flags.index is not None and not problem:
            return _show(snapshot, context, flags)
        if context.as_json:
            show_json(rows, in_a_line=True)
        else:
            say(clock_time(time.time()))
            show_gpu_table(rows, snapshot.withheld)
    return Exit.UNREAD


def _show(snapshot: Snapshot, context: CommandContext, flags: argparse.Namespace) -> int:
    rows = gpu_rows(snapshot)
    if flags.index is None:
        if context.as_json:
            show_json(rows)
        elif rows:
            show_gpu_table(rows, snapshot.withheld)
        return Exit.DONE
    row = next((row for row in rows if row["index"] == flags.index), None)
    if row is None:
        indices = ", ".join(str(row["index"]) for row in rows) or "none"
        raise UserError(f"there is no GPU {flags.index} here; this machine has {indices}")
    if context.as_json:
        show_json(row)
    else:
        show_fields((name, _field_text(name, value)) for name, value in row.items() if name != "processes")
    return Exit.DONE


def gpu_rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    return [_gpu(*pair) for pair in zip(snapshot.samples, snapshot.choices, strict=True)]


def _gpu(sample: GpuSample, choice: GpuChoice) -> dict[str, Any]:
    busy, condition = choice.state == "busy", sample.condition or Condition()
    return {
        "index": sample.index,
        "uuid": sample.uuid,
        "name": sample.name,
        **public_values(sample),
        "is_busy": busy,
        "current_job": choice.job_id,
        "current_job_type": ("training" if choice.job_id is not None else "foreign") if busy else None,
        "healthy": choice.state != "unhealthy",
        "reason": choice.reason,
        "timestamp": sample.timestamp,
        "processes": sample.processes,
        **public_values(condition),
        "xid": condition.xid and asdict(condition.xid),
    }


def show_gpu_table(rows: Sequence[dict[str, Any]], withheld: Sequence[int] = ()) -> None:
    """Print one row per GPU; all GPUs reserved for other users share one row."""
    withheld = [row["index"] for row in rows if row["index"] in withheld]
    reason = next((row["reason"] for row in rows if row["index"] in withheld), "")
    if len(withheld) > 1:
        rows = [row for row in rows if row["index"] not in withheld]
    sensors = columns()
    headings = ("GPU", "NAME", "UTIL", "MEMORY", *(one.heading for one in sensors), "STATE")
    show_table(
        headings,
        [
            (
                row["index"],
                row["name"],
                with_unit("utilization", row[PUBLIC["utilization"]]),
                _memory(row[PUBLIC["memory_used_bytes"]], row[PUBLIC["memory_total_bytes"]]),
                *(_in_units(one, row[one.public]) for one in sensors),
                row["reason"] or "available",
            )
            for row in rows
        ],
    )
    if len(withheld) > 1:
        say(f"{ranges(withheld)}: {reason}")


def _memory(used: int | None, total: int | None) -> str:
    return UNKNOWN if used is None or total is None else f"{gibibytes(used)} / {gibibytes(total)}"


def _in_units(sensor: Sensor, value: float | None) -> str:
    """Return a sensor's value with its unit."""
    unit = sensor.unit.words if sensor.unit else ""
    if value is None or unit == "bytes":
        return UNKNOWN if value is None else gibibytes(value)
    return f"{value:.0f}{'' if unit == '%' else ' '}{unit}".rstrip()


def with_unit(name: str, value: float | dict[str, int] | None) -> str:
    """Return a value with the unit of the sensor named `name` in JSON."""
    if value is None:
        return UNKNOWN
    if isinstance(value, dict):
        return ", ".join(f"{part} {count}" for part, count in value.items())
    sensor = _sensors().get(name)
    return _in_units(sensor, value) if sensor and sensor.unit else str(value)


@functools.cache
def _sensors() -> dict[str, Sensor]:
    """Return a dict mapping each exported sensor's JSON name to the sensor."""
    # A list of GPUs contains no totals.
    from sae_tui.gpu.aggregate import Aggregate

    return {one.public: one for kind in (GpuSample, Condition, Aggregate) for one in exported(kind).values()}


def _field_text(name: str, value: Any) -> object:
    """Return a GPU field as text with its unit; convert a timestamp to a date."""
    if name == "timestamp":
        return clock_time(value)
    return with_unit(name, value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

"""`sae-tui gpus | metrics | recommend`: shows GPU activity and recommends GPUs for a job."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from sae_tui.cli_commands.context import CommandContext, read_job
from sae_tui.cli_commands.output import UNKNOWN, clock_time, say, say_all, show_fields, show_json, show_table, warn
from sae_tui.cli_commands.past import array_lines, csv_lines, object_lines, past_of
from sae_tui.cli_commands.snapshot import Snapshot
from sae_tui.gpu.aggregate import Aggregate, aggregate
from sae_tui.gpu.base import PUBLIC, Condition, GpuSample, columns
from sae_tui.gpu.sensors import Sensor, exported, public_values
from sae_tui.gpu.visible import ranges
from sae_tui.jobs.gpus.availability import GpuChoice
from sae_tui.jobs.launch import placement
from sae_tui.jobs.launch.best_gpus import best_gpus
from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.memory_need import used_before
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.planning.check_job import propose, wanted_devices
from trainer.contract.settings.consent import Consent
from trainer.contract.wording import gibibytes

WATCH_S = 1.0
# Maps each exported sensor's JSON name to the sensor.
SENSORS = {one.public: one for kind in (GpuSample, Condition, Aggregate) for one in exported(kind).values()}


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
        rows = [row for row in _gpus(snapshot) if flags.index in (None, row["index"])]
        if snapshot.problem not in ("", problem):
            warn(snapshot.problem)
        problem = snapshot.problem
        if not rows and flags.index is not None and not problem:
            return _show(snapshot, context, flags)
        if context.as_json:
            show_json(rows, in_a_line=True)
        else:
            say(clock_time(time.time()))
            _show_gpu_table(rows, snapshot.withheld)
    return Exit.UNREAD


def _show(snapshot: Snapshot, context: CommandContext, flags: argparse.Namespace) -> int:
    rows = _gpus(snapshot)
    if flags.index is None:
        if context.as_json:
            show_json(rows)
        elif rows:
            _show_gpu_table(rows, snapshot.withheld)
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


def show_metrics(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the totals or each GPU's values, and the stored history if requested; return 1 for a broken driver."""
    if context.has_broken_driver():
        return Exit.FAILED
    if context.only and flags.since and flags.view == "aggregated":
        raise UserError("--only: the stored totals are those of all GPUs; add --view per_gpu, or leave --since out")
    if flags.csv:
        _show_table_of_past(context, flags)
        return Exit.DONE
    if flags.view == "aggregated":
        totals = _totals(context.gpus.samples)
        past = past_of(context, flags)
        if not context.as_json:
            show_fields((name, _with_unit(name, value)) for name, value in totals.items())
            say_all(past.total_lines() if past else ())
        elif past:
            say_all(object_lines(totals | {"every_s": past.every_s}, past.total_objects()))
        else:
            show_json(totals)
        return Exit.DONE
    rows, past = _gpus(context.gpus), past_of(context, flags)
    if not context.as_json:
        if rows:
            _show_gpu_table(rows, context.gpus.withheld)
        if past:
            for row in rows:
                say_all(past.card_lines(row["index"], row["uuid"]))
    elif past:
        say_all(array_lines(object_lines(row, past.gpu_objects(row["uuid"])) for row in rows))
    else:
        show_json(rows)
    return Exit.DONE


def _show_table_of_past(context: CommandContext, flags: argparse.Namespace) -> None:
    """Print the stored history as CSV, either the totals over all GPUs or the rows for each GPU."""
    past = past_of(context, flags)
    assert past is not None
    if flags.view == "aggregated":
        say_all(csv_lines(past.total_objects()))
        return
    gpus = [(sample.index, sample.uuid) for sample in context.gpus.samples]
    rows = ({"gpu_index": i, "gpu_uuid": uuid} | row for i, uuid in gpus for row in past.gpu_objects(uuid))
    say_all(csv_lines(rows))


def recommend(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the GPUs best suited to a job; return 1 if there are none or the driver is broken."""
    # No consent is needed, because this command runs no code from the job file.
    job = read_job(flags.job, flags.overrides, consent=Consent(to_all=True))
    if context.has_broken_driver():
        return Exit.FAILED
    gpus, past, several = context.gpus, context.past(), context.settings.multi_gpu_enabled
    here = placement.machine(gpus.choices, context.data, cuda=gpus.cuda)
    is_open = not flags.count and job.launch.gpus == "auto"
    best = best_gpus(job, here, used_before(past), several=several) if is_open else None
    count = best.count if best else flags.count or wanted_devices(job) if several else 1
    asked = job.replace("launch", gpus=f"auto:{count}", backend="local")
    look, kind = propose(asked, here, used_before(past)).outlook, launch_kind(job.kind)
    took = kind.measured(job, look, "cuda" if gpus.cuda else "cpu", past)
    # Any idle GPU suits a job whose needs are unknown.
    advice = placement.recommend(gpus.choices, look.needs_bytes or 0, count)
    if context.as_json:
        facts: dict[str, Any] = {"memory_required": look.needs_bytes, "memory_measured": took and took.peak_bytes}
        facts |= {"mode": look.mode, "why": best.why if best else ""}
        show_json(msgspec.structs.asdict(advice) | facts)
        return Exit.DONE if advice.gpus else Exit.FAILED
    say(kind.needs(look, took))
    rows = [(f"GPU {index}", "take" if index in advice.gpus else "", why) for index, why in advice.reasons.items()]
    if rows:
        show_table(("GPU", "", "WHY"), rows)
    if advice.shortfall:
        say(advice.shortfall)
    else:
        say(f"--gpus {','.join(map(str, advice.gpus))}{f': {best.why}' if best else ''}")
    return Exit.DONE if advice.gpus else Exit.FAILED


def _totals(samples: Sequence[GpuSample]) -> dict[str, Any]:
    whole = aggregate(samples)
    return {
        "gpu_count": whole.gpu_count,
        "unhealthy_count": sum(not sample.healthy for sample in samples),
        **public_values(whole),
        "gpus_with": asdict(whole.counted),
    }


def _gpus(snapshot: Snapshot) -> list[dict[str, Any]]:
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


def _show_gpu_table(rows: Sequence[dict[str, Any]], withheld: Sequence[int] = ()) -> None:
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
                _with_unit("utilization", row[PUBLIC["utilization"]]),
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


def _with_unit(name: str, value: float | dict[str, int] | None) -> str:
    """Return a value with the unit of the sensor named `name` in JSON."""
    if value is None:
        return UNKNOWN
    if isinstance(value, dict):
        return ", ".join(f"{part} {count}" for part, count in value.items())
    sensor = SENSORS.get(name)
    return _in_units(sensor, value) if sensor and sensor.unit else str(value)


def _field_text(name: str, value: Any) -> object:
    """Return a GPU field as text with its unit; convert a timestamp to a date."""
    if name == "timestamp":
        return clock_time(value)
    return _with_unit(name, value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value

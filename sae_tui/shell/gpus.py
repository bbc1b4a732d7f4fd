"""`sae-tui gpus | metrics | recommend`: what the GPUs are doing and which to take."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from sae_tui.gpu.aggregate import aggregate
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.history import StoredSample, since
from sae_tui.jobs import placement
from sae_tui.jobs.availability import GpuChoice
from sae_tui.jobs.need import Room, need
from sae_tui.jobs.words import gigabytes
from sae_tui.shell.context import Context, read_job
from sae_tui.shell.output import UNKNOWN, clock_time, say, show_fields, show_json, show_table
from trainer.contract.problems import UserError
from trainer.contract.store import StoreMissing
from trainer.contract.validate import wanted_ranks


def show_gpus(context: Context, flags: argparse.Namespace) -> int:
    """All GPUs as a list, or the one asked for as an object."""
    rows = _gpus(context)
    if flags.index is None:
        if context.as_json:
            show_json(rows)
        elif rows:
            _show_gpu_table(rows)
        return 0
    row = next((row for row in rows if row["index"] == flags.index), None)
    if row is None:
        known = ", ".join(str(row["index"]) for row in rows) or "none"
        raise UserError(f"there is no GPU {flags.index} here; this machine has {known}")
    if context.as_json:
        show_json(row)
    else:
        show_fields((name, value) for name, value in row.items() if name != "processes")
    return 0


def show_metrics(context: Context, flags: argparse.Namespace) -> int:
    """The whole machine, or every GPU with what was stored of its past."""
    if flags.view == "aggregated":
        totals = _totals(context.gpus.samples)
        if context.as_json:
            show_json(totals)
        else:
            show_fields((name, _worded(name, value)) for name, value in totals.items())
        return 0
    rows = _gpus(context)
    if flags.since is not None:
        for row in rows:
            row["history"] = [_stored(sample) for sample in _history(context, row["index"], flags.since)]
    if context.as_json:
        show_json(rows)
    elif rows:
        _show_gpu_table(rows)
        for row in rows:
            if "history" in row:
                say()
                say(f"GPU {row['index']}: {len(row['history'])} stored samples")
                if row["history"]:
                    _show_history(row["history"])
    return 0


def recommend(context: Context, flags: argparse.Namespace) -> int:
    """The GPUs that suit a job best; 1 where there is none."""
    job = read_job(flags.job, flags.overrides)
    count = flags.count or wanted_ranks(job)
    if not context.settings.multi_gpu_enabled:
        count = 1
    device = "cuda" if context.gpus.cuda else "cpu"
    needed = need(job, job.data_shape(), count, Room(), on_gpus=True, device=device, past=context.past())
    found = placement.recommend(context.gpus.choices, needed.rank_bytes, count)
    if context.as_json:
        show_json(msgspec.structs.asdict(found) | {"memory_measured": needed.measured_bytes})
        return 0 if found.gpus else 1
    say(f"needs {gigabytes(found.memory_required)} per GPU" + (f"; {needed.measured}" if needed.measured else ""))
    rows = [(f"GPU {index}", "take" if index in found.gpus else "", why) for index, why in found.reasons.items()]
    if rows:
        show_table(("GPU", "", "WHY"), rows)
    if found.shortfall:
        say(found.shortfall)
    else:
        say(f"--gpus {','.join(map(str, found.gpus))}")
    return 0 if found.gpus else 1


def _totals(samples: Sequence[GpuSample]) -> dict[str, Any]:
    whole = aggregate(samples)
    return {
        "gpu_count": whole.gpu_count,
        "unhealthy_count": sum(not sample.healthy for sample in samples),
        "total_memory_used": whole.total_memory_used_bytes,
        "total_memory_total": whole.total_memory_total_bytes,
        "average_utilization": whole.average_utilization,
        "max_temperature": whole.hottest and whole.hottest.temperature_c,
        "total_power_draw": whole.total_power_w,
        "total_power_limit": whole.total_power_limit_w,
        "gpus_with": asdict(whole.counted),
    }


def _gpus(context: Context) -> list[dict[str, Any]]:
    return [_gpu(*pair) for pair in zip(context.gpus.samples, context.gpus.choices, strict=True)]


def _gpu(sample: GpuSample, choice: GpuChoice) -> dict[str, Any]:
    busy = choice.state == "busy"
    return {
        "index": sample.index,
        "uuid": sample.uuid,
        "name": sample.name,
        "memory_total": sample.memory_total_bytes,
        "memory_used": sample.memory_used_bytes,
        "memory_free": sample.memory_free_bytes,
        "utilization": sample.utilization,
        "temperature": sample.temperature_c,
        "power_draw": sample.power_w,
        "power_limit": sample.power_limit_w,
        "is_busy": busy,
        "current_job": choice.job_id,
        "current_job_type": ("training" if choice.job_id is not None else "foreign") if busy else None,
        "healthy": sample.healthy,
        "reason": choice.reason,
        "timestamp": sample.timestamp,
        "processes": sample.processes,
    }


def _show_gpu_table(rows: Sequence[dict[str, Any]]) -> None:
    headings = ("GPU", "NAME", "UTIL", "MEMORY", "TEMP", "POWER", "STATE")
    show_table(
        headings,
        [
            (
                row["index"],
                row["name"],
                _worded("utilization", row["utilization"]),
                _memory(row["memory_used"], row["memory_total"]),
                _worded("temperature", row["temperature"]),
                _worded("power", row["power_draw"]),
                row["reason"] or "available",
            )
            for row in rows
        ],
    )


def _memory(used: int | None, total: int | None) -> str:
    return UNKNOWN if used is None or total is None else f"{gigabytes(used)} / {gigabytes(total)}"


def _worded(name: str, value: float | dict[str, int] | None) -> str:
    """The value with the unit that its name implies."""
    if value is None:
        return UNKNOWN
    if isinstance(value, dict):
        return ", ".join(f"{part} {count}" for part, count in value.items())
    for word, worded in (
        ("utilization", f"{value:.0f}%"),
        ("memory", gigabytes(value)),
        ("temperature", f"{value:.0f} °C"),
        ("power", f"{value:.0f} W"),
    ):
        if word in name:
            return worded
    return str(value)


def _history(context: Context, index: int, seconds: float) -> list[StoredSample]:
    try:
        return since(context.data.gpu_db, socket.gethostname(), seconds, index)
    except StoreMissing:
        return []


def _stored(sample: StoredSample) -> dict[str, Any]:
    return {
        "timestamp": sample.timestamp,
        "utilization": sample.utilization,
        "memory_used": sample.memory_used_bytes,
        "memory_total": sample.memory_total_bytes,
        "temperature": sample.temperature_c,
        "power_draw": sample.power_w,
        "job_id": sample.job_id,
    }


def _show_history(history: Sequence[dict[str, Any]]) -> None:
    """Minute by minute, the last sample of each: a line per second would be no table."""
    minutes = {int(sample["timestamp"] // 60): sample for sample in history}
    headings = ("TIME", "UTIL", "MEMORY", "TEMP", "POWER", "JOB")
    show_table(
        headings,
        [
            (
                clock_time(sample["timestamp"]),
                _worded("utilization", sample["utilization"]),
                _worded("memory", sample["memory_used"]),
                _worded("temperature", sample["temperature"]),
                _worded("power", sample["power_draw"]),
                sample["job_id"],
            )
            for sample in minutes.values()
        ],
    )

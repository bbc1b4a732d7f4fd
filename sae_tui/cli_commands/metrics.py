"""Shows the current and past load of the GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.gpus import gpu_rows, show_gpu_table, with_unit
from sae_tui.cli_commands.output import say_all, show_fields, show_json
from sae_tui.cli_commands.past import array_lines, csv_lines, object_lines, past_of
from sae_tui.gpu.aggregate import aggregate
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.sensors import public_values
from trainer.contract.errors import UsageError
from trainer.contract.exits import Exit


def show_metrics(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print the totals or each GPU's values, and the stored history if requested; return 1 for a broken driver."""
    if context.has_broken_driver():
        return Exit.FAILED
    if context.only and flags.since and flags.view == "aggregated":
        raise UsageError("--only: the stored totals cover all GPUs; add --view per_gpu, or leave --since out")
    if flags.csv:
        _show_table_of_past(context, flags)
        return Exit.DONE
    if flags.view == "aggregated":
        totals = _totals(context.gpus.samples)
        past = past_of(context, flags)
        if not context.as_json:
            show_fields((name, with_unit(name, value)) for name, value in totals.items())
            say_all(past.total_lines() if past else ())
        elif past:
            say_all(object_lines(totals | {"every_s": past.every_s}, past.total_objects()))
        else:
            show_json(totals)
        return Exit.DONE
    rows, past = gpu_rows(context.gpus), past_of(context, flags)
    if not context.as_json:
        if rows:
            show_gpu_table(rows, context.gpus.withheld)
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


def _totals(samples: Sequence[GpuSample]) -> dict[str, Any]:
    whole = aggregate(samples)
    return {
        "gpu_count": whole.gpu_count,
        "unhealthy_count": sum(not sample.healthy for sample in samples),
        **public_values(whole),
        "gpus_with": asdict(whole.counted),
    }

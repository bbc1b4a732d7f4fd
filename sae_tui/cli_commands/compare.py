"""`sae-tui compare`: compares runs in tables or as JSON, or writes their curves to an SVG or CSV file."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import UNKNOWN, say, show_json, show_table
from sae_tui.compare.export import refuse_existing, write_picture, write_table
from sae_tui.compare.lines import CurveView
from sae_tui.compare.run import ComparedSae
from sae_tui.compare.runs import Comparison, Runs
from sae_tui.compare.tables import ComparisonRow, all_results, differences, over_seeds, results, value_of
from sae_tui.jobs.energy import energy_of
from sae_tui.settings import Settings
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.paths import working_folder
from trainer.contract.settings.series import CRITERION, held_out
from trainer.contract.store.job_store import Control


def compare(context: CommandContext, flags: argparse.Namespace) -> int:
    """Print how the runs differ; with `--svg` or `--csv`, write their curves instead."""
    with _open_runs(context, flags.ids) as runs:
        comparison = runs.read(flags.metric or held_out(CRITERION))
        if flags.metric and comparison.metric != flags.metric:
            names = ", ".join(comparison.metrics) or "none yet"
            raise UserError(f'--metric: these runs have no "{flags.metric}"; use one of {names}')
        if flags.svg or flags.csv:
            _write(context, runs, comparison, flags)
        elif context.as_json:
            show_json(_as_json(comparison.saes, context.settings))
        else:
            _show(comparison, context.settings)
    return Exit.DONE


@contextlib.contextmanager
def _open_runs(context: CommandContext, job_ids: Sequence[int]) -> Iterator[Runs]:
    """Open each run; raise `UserError` if a job does not exist."""
    job_ids = list(dict.fromkeys(job_ids))
    with contextlib.closing(Control(context.data.control_db, readonly=True)) as control:
        for job_id in job_ids:
            control.job(job_id)
    with contextlib.closing(Runs(context.data, job_ids)) as runs:
        yield runs


def _write(context: CommandContext, runs: Runs, comparison: Comparison, flags: argparse.Namespace) -> None:
    if not flags.force:
        refuse_existing(filter(None, (flags.svg, flags.csv)))
    if flags.svg:
        view = CurveView(comparison.metric, flags.x, flags.smooth, flags.log)
        write_picture(flags.svg, comparison, view, force=flags.force)
    if flags.csv:
        write_table(flags.csv, runs, flags.metric or "", force=flags.force)
    written = {"svg": flags.svg, "csv": flags.csv}
    if context.as_json:
        show_json({kind: str(working_folder() / path) for kind, path in written.items() if path})
        return
    for path in filter(None, written.values()):
        say(f"wrote {path}")


def _show(comparison: Comparison, settings: Settings) -> None:
    labels = [sae.label for sae in comparison.saes]
    differing = differences(comparison.saes)
    if differing:
        show_table(["SETTING", *labels], [_words(line) for line in differing])
    else:
        say(
            "all settings are the same"
            if len(labels) > 1
            else "this is the only run; give another id to compare it with"
        )
    say()
    lines = results(comparison.saes, settings)
    show_table(["RESULT", *labels], [_words(line) for line in lines])
    reasons = [*(seeds.words for seeds in over_seeds(comparison.saes)), *(line.why for line in lines if line.why)]
    if reasons:
        say()
    for reason in reasons:
        say(reason)


def _words(line: ComparisonRow) -> list[str]:
    return [line.title, *line.words(UNKNOWN)]


def _as_json(saes: Sequence[ComparedSae], settings: Settings) -> dict[str, Any]:
    members = [
        {"id": sae.job.id, "name": sae.job.name, "state": sae.job.state, "sae": sae.member}
        | {result.name: value_of(sae, result.name) for result in all_results()}
        | {"metrics": dict(sae.latest)}
        | {name: getattr(energy_of(sae.job, settings), name) for name in ("energy_share", "cost", "currency", "co2_g")}
        for sae in saes
    ]
    alike = [line for line in results(saes) if line.same]
    return {
        "runs": members,
        "differences": {line.title: line.values for line in differences(saes)},
        "same": {line.title: [saes[place].label for place in sorted(line.same)] for line in alike},
        "same_because": {line.title: line.why for line in alike},
        "seeds": [
            {"id": one.job_id, "sae": one.group, "labels": one.labels, "figures": one.spreads}
            for one in over_seeds(saes)
        ],
    }

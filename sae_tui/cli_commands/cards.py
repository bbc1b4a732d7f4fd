"""`sae-tui job ID --cards | --card N`: prints a job's current and earlier report cards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import clock_time, say, show_json, show_table
from sae_tui.jobs.evaluation.report_card import version_of, versions_of
from sae_tui.jobs.output import why_no_sae
from trainer.contract.runs.card_versions import Version
from trainer.contract.runs.report_card import PART_TITLES, as_table, lines
from trainer.contract.store.rows import Job


def show_cards(context: CommandContext, job: Job) -> None:
    """List a job's report cards with their times, steps, parts and FVU."""
    cards = versions_of(context.data.sae(job.id))
    if context.as_json:
        show_json([_row(label, one) for label, versions in cards.items() for one in versions])
    elif not cards:
        say(why_no_sae(job) or f"job {job.id} has no report card; run `sae-tui eval {job.id}`")
    else:
        titles = ("CARD", "MEASURED", "STEP", "FVU", "CE SCORE", "PARTS", *(["SAE"] if [*cards] != [""] else []))
        show_table(titles, [_cells(label, one, titles) for label, versions in cards.items() for one in versions])
        say(f"`sae-tui job {job.id} --card N` shows one in full")


def show_card(context: CommandContext, job_id: int, number: int) -> None:
    """Print one report card in full."""
    shown: Mapping[str, Version] = version_of(context.data.sae(job_id), number)
    if context.as_json:
        show_json([_row(label, one) | {"card": as_table(one.card)} for label, one in shown.items()])
        return
    for one in shown.values():
        for line in lines(one.card):
            say(line)


def measured(version: Version) -> float | None:
    """Return the time of the latest measurement in a report card, or None if it is unknown."""
    return max((part.measured for part in version.card.parts.values()), default=None)


def _row(label: str, one: Version) -> dict[str, Any]:
    spliced = one.card.spliced
    return {
        "number": one.number,
        "sae": label,
        "is_current": one.is_current,
        "measured": measured(one),
        "step": one.card.step,
        "tokens": one.card.tokens,
        "weights": one.card.weights,
        "fvu": one.card.figures.fvu,
        "ce_score": spliced.ce_score if spliced else None,
        "parts": {name: part.measured for name, part in one.card.parts.items()},
        "has_features": one.features is not None,
    }


def _cells(label: str, one: Version, titles: tuple[str, ...]) -> tuple[object, ...]:
    spliced = one.card.spliced
    parts = ", ".join(PART_TITLES.get(name, name) for name in one.card.parts) or "rows"
    cells = (
        f"{one.number}{' now' * one.is_current}",
        clock_time(measured(one)),
        one.card.step or None,
        f"{one.card.figures.fvu:.4f}",
        f"{spliced.ce_score:.3f}" if spliced else None,
        parts,
    )
    return (*cells, label) if len(titles) > len(cells) else cells


def features_of(context: CommandContext, job_id: int, number: int) -> dict[str, Path]:
    """Return a dict mapping each SAE's label to its feature file, if still stored."""
    shown = version_of(context.data.sae(job_id), number)
    return {label: one.features for label, one in shown.items() if one.features}

"""`sae-tui job ID --cards | --card N | --against M`: prints a job's report cards, and the difference between two."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.output import clock_time, say, show_json, show_table, text
from sae_tui.cli_commands.values import CardName
from sae_tui.compare.cards import NO_ERROR, Difference, differences, limits_of
from sae_tui.jobs.evaluation.report_card import version_of, versions_of
from sae_tui.jobs.output import why_no_sae
from sae_tui.jobs.store_access import existing
from trainer.contract.errors import UserError
from trainer.contract.runs.card_versions import Version
from trainer.contract.runs.report_card import PART_TITLES, as_table, lines
from trainer.contract.store.rows import Job


def show_cards(context: CommandContext, job: Job) -> None:
    """List a job's report cards with their times, steps, parts and FVU."""
    cards = versions_of(context.data.sae(job.id))
    if context.as_json:
        show_json([_row(label, one) for label, versions in cards.items() for one in versions])
    elif not cards:
        say(_why_no_card(job))
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


def show_differences(context: CommandContext, job_id: int, number: int | None, against: CardName) -> None:
    """Print how a report card's figures differ from another card's; if `number` is None, use the current card."""
    other_id = job_id if against.job_id is None else against.job_id
    with existing(context.data, other_id) as control:
        jobs = control.job(job_id), control.job(other_id)
    ours = _chosen(context, jobs[0], number, "--card: " if number else "")
    theirs = _chosen(context, jobs[1], against.number, "--against: ")
    pairs = _pairs(ours, theirs)
    if not pairs:
        raise UserError(f"--against: jobs {job_id} and {other_id} have no SAE with the same label")
    if context.as_json:
        show_json([_difference_row(label, one, other, other_id) for label, (one, other) in pairs.items()])
        return
    for label, (one, other) in pairs.items():
        here, there = (f"job {of} card {card.number}" for of, card in ((job_id, one), (other_id, other)))
        say(text(" · ".join(filter(None, [label, f"{here} against {there}"]))))
        for limit in limits_of(one.card, other.card):
            say(text(f"! {limit}"))
        found = differences(one.card, other.card)
        show_table(("FIGURE", "GROUP", here.upper(), there.upper(), "DIFFERENCE", ""), map(_difference_cells, found))
        if any(each.is_exact for each in found):
            say(f"* {NO_ERROR}")


def _chosen(context: CommandContext, job: Job, number: int | None, flag: str) -> Mapping[str, Version]:
    """Return a job's report cards with this number (if None, the current ones), keyed by their SAE's label."""
    versions = versions_of(context.data.sae(job.id))
    if not versions:
        raise UserError(flag + _why_no_card(job))
    if number is None:
        return {label: of_sae[0] for label, of_sae in versions.items()}
    shown = {label: one for label, of_sae in versions.items() for one in of_sae if one.number == number}
    if shown:
        return shown
    there = sorted({one.number for of_sae in versions.values() for one in of_sae})
    raise UserError(f"{flag}job {job.id} has the report cards {', '.join(map(str, there))}; give one of them")


def _why_no_card(job: Job) -> str:
    return why_no_sae(job) or f"job {job.id} has no report card; run `sae-tui eval {job.id}`"


def _pairs(ours: Mapping[str, Version], theirs: Mapping[str, Version]) -> dict[str, tuple[Version, Version]]:
    """Return pairs of cards with the same label, or pairs of one job's only card and each card of the other job."""
    if len(theirs) == 1:
        (other,) = theirs.values()
        return {label: (one, other) for label, one in ours.items()}
    if len(ours) == 1 and not ours.keys() & theirs.keys():
        (one,) = ours.values()
        return {label: (one, other) for label, other in theirs.items()}
    return {label: (one, theirs[label]) for label, one in ours.items() if label in theirs}


def _difference_cells(one: Difference) -> tuple[object, ...]:
    sides = [f"{side.text}{f' ± {side.error_text}' if side.error_text else ''}" if side else None
             for side in (one.here, one.there)]  # fmt: skip
    return one.figure.series.title, one.figure.group.replace("_", " "), *sides, one.signed, one.mark


def _difference_row(label: str, here: Version, there: Version, other_id: int) -> dict[str, Any]:
    return {
        "sae": label,
        "number": here.number,
        "against": {"job": other_id, "number": there.number, "sae": there.card.label},
        "limits": list(limits_of(here.card, there.card)),
        "figures": [_figure_row(one) for one in differences(here.card, there.card)],
    }


def _figure_row(one: Difference) -> dict[str, Any]:
    here, there = one.here, one.there
    return {
        "name": one.figure.name,
        "better": one.figure.series.better,
        "value": here.value if here else None,
        "error": here.error if here else None,
        "against": there.value if there else None,
        "against_error": there.error if there else None,
        "difference": one.change,
        "verdict": one.verdict,
        "is_exact": one.is_exact,
    }


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
    """Return a dict mapping each SAE's label to its feature file, if the file is still stored."""
    shown = version_of(context.data.sae(job_id), number)
    return {label: one.features for label, one in shown.items() if one.features}

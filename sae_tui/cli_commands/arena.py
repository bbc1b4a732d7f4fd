"""`sae-tui arena`: trains recipes on synthetic data and compares them by the known features that they find."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sae_tui.cli_commands.context import CommandContext
from sae_tui.cli_commands.job_files import consent_of, read_job
from sae_tui.cli_commands.launching import record_all
from sae_tui.cli_commands.output import UNKNOWN, say, show_json, show_table, warn
from sae_tui.cli_commands.waiting import EXITS, wait_until_ended
from sae_tui.compare.tables import BEST, SAME
from sae_tui.jobs.evaluation.report_card import whole_cards
from sae_tui.jobs.states import ENDED
from sae_tui.jobs.view.reader import JobView
from trainer.contract.errors import UserError
from trainer.contract.exits import Exit
from trainer.contract.runs.card_figures import CardFigure, figures_of, in_form
from trainer.contract.runs.report_card import Card
from trainer.contract.runs.spread_words import spread_words
from trainer.contract.settings.catalog import TRAINING
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import any_job_of, to_table
from trainer.contract.store.seeds import Spread, by_seeds, spread_of
from trainer.contract.wording import join_words

# The data for recipes whose job files do not specify synthetic data: features in trees and topics, as in SynthSAEBench,
# but few enough for a CPU.
DATA = {
    "source": "synthetic", "d_in": 256, "n_features": 1024, "active": 12.0, "skew": 0.7, "children": 4, "topics": 8,
}  # fmt: skip
TAG = "arena"
# Maps each column's title to the name of its figure on report cards.
FIGURES = {
    "F1": "f1", "PRECISION": "precision", "RECALL": "recall", "MCC": "mcc", "UNIQUE": "uniqueness",
    "RECOVERED": "recovery", "L0": "l0", "FVU": "fvu", "NEVER FIRE": "dead",
}  # fmt: skip
# Two means differ if they are more than this number of standard errors apart.
_APART = 2.0


class ArenaRecipe(msgspec.Struct, frozen=True):
    """One of a job's SAEs, over its seeds: its name, the number of seeds, and its figures and their spreads by name."""

    job_id: int
    name: str
    n: int
    figures: dict[str, CardFigure]
    spreads: dict[str, Spread]
    true_l0: float
    d_sae: int
    data: str

    def mean(self, name: str) -> float | None:
        if spread := self.spreads.get(name):
            return spread.mean
        return self.figures[name].value if name in self.figures else None

    def error(self, name: str) -> float:
        """Return the larger of the standard errors over the seeds and over the rows; 0 if both are unknown."""
        spread = self.spreads.get(name)
        own = self.figures[name].error if name in self.figures else None
        return max(spread.sd / math.sqrt(spread.n) if spread else 0.0, own or 0.0)

    def words(self, name: str) -> str:
        if name not in self.figures:
            return UNKNOWN
        series = self.figures[name].series
        spread = self.spreads.get(name)
        return spread_words(spread, series) if spread else in_form(self.figures[name].value, series)


def arena(context: CommandContext, flags: argparse.Namespace) -> int:
    """Train the recipes with several seeds, or use ended jobs, and print a table, largest F1 first."""
    words = list(dict.fromkeys(flags.jobs))
    files = [Path(word) for word in words if not word.isdecimal()]
    overrides, consent = [*flags.overrides], consent_of(context, flags)
    jobs = [_on_known_features(read_job(file, overrides, flags.gpus, consent), file, flags.seeds) for file in files]
    ids = [int(word) for word in words if word.isdecimal()]
    if jobs:
        options = argparse.Namespace(**vars(flags), after=[], hold=False, tag=[TAG], wait=True)
        launched, _ = record_all(context, options, jobs)
        ids += launched
        if not context.as_json:
            again = " ".join(map(str, ids))
            warn(f"Ctrl-C leaves the jobs running; `sae-tui arena {again}` then shows the table")
    ended = [wait_until_ended(context, job_id, prints_end=bool(jobs)) for job_id in ids]
    recipes = ranked([recipe for view in ended for recipe in recipes_of(view, whole_cards(context.data.sae(view.id)))])
    without = [view for view in ended if not any(recipe.job_id == view.id for recipe in recipes)]
    lacking = [str(view.id) for view in without if not EXITS[view.state]]
    if lacking and not recipes:
        raise UserError(_without_features(lacking))
    if context.as_json:
        show_json(as_json(recipes))
    elif recipes:
        _show(recipes)
    for view in without:
        if EXITS[view.state]:
            warn(f"job {view.id} {ENDED[view.state]}: it is not in the table")
    if lacking:
        warn(_without_features(lacking))
    return max((EXITS[view.state] for view in ended), default=Exit.DONE) or (Exit.FAILED if lacking else Exit.DONE)


def _without_features(ids: list[str]) -> str:
    return f"no known features on the report cards of {join_words(ids)}; train on synthetic data"


def _on_known_features(job: AnyJob, file: Path, n_seeds: int) -> AnyJob:
    """Return the job with `DATA` and `n_seeds` seeds, but keep any synthetic data and list of seeds from its file.

    Raise `UserError` for a job that the arena cannot compare.
    """
    if job.kind != TRAINING:
        raise UserError(f'{file}: the arena compares training jobs, and this one has kind = "{job.kind}"')
    table = to_table(job)
    if table["data"].get("target_path"):
        raise UserError(f"{file}: the arena compares SAEs; leave out data.target_path, which makes a transcoder")
    if table["data"]["source"] == DATA["source"] and table["data"]["held_out_tokens"] == 0:
        raise UserError(f"{file}: data.held_out_tokens is 0, but the arena needs a report card; leave it out")
    table["train"]["report_card"] = True
    if table["data"]["source"] != DATA["source"]:
        table["data"] = dict(DATA)
    if not isinstance(table["train"]["seed"], list) and n_seeds > 1:
        table["train"]["seed"] = [*range(n_seeds)]
    return any_job_of(table)


def recipes_of(view: JobView, cards: dict[str, Card]) -> Iterable[ArenaRecipe]:
    """Yield a recipe for each SAE of a job with known features; SAEs that differ only in the seed are one recipe."""
    for group, labels in by_seeds({label: card for label, card in cards.items() if card.known}).items():
        of_seeds = [{one.name: one for one in figures_of(cards[label])} for label in labels]
        shared = set.intersection(*map(set, of_seeds))
        spreads = {name: spread_of([figures[name].value for figures in of_seeds]) for name in shared}
        known = cards[labels[0]].known
        yield ArenaRecipe(
            job_id=view.id,
            name=" ".join(filter(None, [view.name, group])),
            n=len(labels),
            figures={name: of_seeds[0][name] for name in shared},
            spreads={name: spread for name, spread in spreads.items() if spread},
            true_l0=known.true_l0 if known else math.nan,
            d_sae=cards[labels[0]].figures.d_sae,
            data=known.data if known else "",
        )


def ranked(recipes: Iterable[ArenaRecipe]) -> list[ArenaRecipe]:
    """Sort the recipes by mean F1, largest first."""
    return sorted(recipes, key=lambda one: -(one.mean("f1") or 0))


def alike(recipes: Sequence[ArenaRecipe]) -> list[bool]:
    """Return whether each recipe's F1 is within two standard errors of the first one's.

    F1 is a mean over latents, so it is compared only between SAEs with the same number of latents on the same data.
    """
    first = recipes[0]

    def is_alike(one: ArenaRecipe) -> bool:
        apart = (first.mean("f1") or 0) - (one.mean("f1") or 0)
        comparable = (first.d_sae, first.data) == (one.d_sae, one.data)
        return comparable and apart <= _APART * math.hypot(first.error("f1"), one.error("f1"))

    return [place == 0 or is_alike(one) for place, one in enumerate(recipes)]


def as_json(recipes: Sequence[ArenaRecipe]) -> dict[str, Any]:
    """Return the table for `--json`."""
    marks = alike(recipes) if recipes else []
    rows = [
        {"id": one.job_id, "recipe": one.name, "seeds": one.n, "d_sae": one.d_sae, "true_l0": one.true_l0}
        | {"same_as_best": mark}
        | {
            name: {"mean": one.mean(name), "sd": one.spreads[name].sd if name in one.spreads else None}
            for name in FIGURES.values()
        }
        for one, mark in zip(recipes, marks, strict=True)
    ]
    return {"recipes": rows}


def _show(recipes: Sequence[ArenaRecipe]) -> None:
    marks = [SAME if mark else "" for mark in alike(recipes)]
    is_contest = len({(one.d_sae, one.data) for one in recipes}) == 1 and len(recipes) > 1
    if marks.count(SAME) == 1:
        marks[0] = BEST if is_contest else ""
    rows = [
        (f"{one.name} {mark}".strip(), *map(one.words, FIGURES.values()), one.d_sae, one.job_id)
        for one, mark in zip(recipes, marks, strict=True)
    ]
    show_table(("RECIPE", *FIGURES, "D_SAE", "JOB"), rows)
    say()
    seeds = sorted({one.n for one in recipes})
    over = f"mean ± s.d. over {join_words([*map(str, seeds)])} seeds" if seeds != [1] else ""
    same = f"{SAME}: the F1 is within two standard errors of the largest" if SAME in marks else ""
    known = dict.fromkeys(f"{one.true_l0:.1f}" for one in recipes if math.isfinite(one.true_l0))
    fire = f"{', '.join(known)} features fire per row" if known else ""
    widths = (
        "F1 favours narrow SAEs: compare it only at the same D_SAE" if len({one.d_sae for one in recipes}) > 1 else ""
    )
    data = "the recipes were trained on different data" if len({one.data for one in recipes}) > 1 else ""
    say("; ".join(filter(None, [over, same, fire, widths, data])))

"""Tables that compare runs: the settings that differ, and the results, with the best ones marked."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from sae_tui.compare.noise import Lead, SaeResult, lead_of
from sae_tui.compare.run import ComparedSae
from sae_tui.jobs.energy import Energy, energy_of, grams, is_whole, money, watt_hours
from sae_tui.jobs.output import kind_of
from sae_tui.jobs.states import is_ranked, was_resumed
from sae_tui.settings import Settings
from trainer.contract.runs.recipe import MOST_L0_MISS
from trainer.contract.runs.spread_words import spread_words
from trainer.contract.settings.catalog import Series
from trainer.contract.settings.declare import show
from trainer.contract.settings.series import (
    LOSS,
    SPEED,
    error_of,
    held_out_metrics,
    measure,
    own_series,
    result_metrics,
    series_named,
    title_of,
    with_held_out,
)
from trainer.contract.store.seeds import Spread, names_layer, seed_count, seeds_of, spread_of, without_seed
from trainer.contract.store.states import JobState
from trainer.contract.store.twins import without_twins
from trainer.contract.wording import count, duration, gibibytes, join_words, number

UNKNOWN = "–"
BEST = "★"
SAME = "same"
UNFINISHED = "unfinished"
# Other load on the machine affects speeds and times, so relative differences up to this value are ignored.
LEAST_LEAD = {"tokens_per_s": 0.05, "duration_s": 0.05, "energy_wh": 0.05}
# The results shown in the one-line summary of several seeds.
_BY_SEED = ("heldout_fvu", "heldout_l0", "card_fvu", "card_l0")
# Maps each FVU metric to the L0 metric measured on the same rows.
_L0_OF = {"heldout_fvu": "heldout_l0", "card_fvu": "card_l0"}
# Token counts within this factor of each other are considered equal, because a run always ends with a complete step.
LIKE = 1.02
# Listed with the settings, because these do not show the size of an automatic batch, which is smaller in a short run.
TOKENS_PER_STEP = "tokens per step"
# Prefixes of training settings, which are meaningless for an imported SAE.
_OF_TRAINING = ("train.", "parallel.", "launch.", TOKENS_PER_STEP, "ran as")


class ComparisonRow(msgspec.Struct, frozen=True):
    """A table row: a title, one value per SAE, and the indices of the best SAEs, or of the SAEs considered equal.

    `why` explains why these SAEs are considered equal, and what else limits the comparison.
    """

    title: str
    values: tuple[Any, ...]
    best: frozenset[int] = frozenset()
    word: Callable[[Any], str] = str
    same: frozenset[int] = frozenset()
    why: str = ""
    # The indices of values from unfinished runs, which are not ranked.
    unfinished: frozenset[int] = frozenset()
    # The text after each value's star: the number of tokens the SAE was trained on, if this differs between SAEs.
    notes: tuple[str, ...] = ()
    # The standard errors that follow the values, if they are shown.
    errors: tuple[float | None, ...] = ()

    def words(self, unknown: str = UNKNOWN) -> list[str]:
        """Return the values as text, marked if they are the best, equal to the best, or from unfinished runs."""
        texts = [unknown if value is None else self.word(value) for value in self.values]
        errors = ["" if error is None else f" ± {error:.3f}" for error in self.errors or [None] * len(texts)]
        texts = [f"{text}{error}" for text, error in zip(texts, errors, strict=True)]
        stars = {place: f" {BEST}{self.notes[place] if self.notes else ''}" for place in self.best}
        known = (place for place in self.unfinished if self.values[place] is not None)
        marks = stars | dict.fromkeys(self.same, f" {SAME}") | dict.fromkeys(known, f" {UNFINISHED}")
        return [f"{text}{marks.get(place, '')}" for place, text in enumerate(texts)]


class ComparedFigure(msgspec.Struct, frozen=True):
    """A value compared between runs; `better` is None if neither lower nor higher is better."""

    name: str
    title: str
    better: Literal["lower", "higher"] | None
    word: Callable[[Any], str]


def word_of(metric: str) -> Callable[[float], str]:
    """Return the function that formats a metric's values."""
    return functools.partial(measure, series=series_named(metric))


# Results also available for an imported SAE once it has been evaluated.
_OF_CARD = (
    ComparedFigure("card_fvu", "report card FVU", "lower", word_of("fvu")),
    ComparedFigure("card_l0", "report card L0", None, word_of("l0")),
    # This result is not ranked, because the more rows are read, the more latents fire.
    ComparedFigure("card_dead", "report card did not fire", None, word_of("dead_fraction")),
    ComparedFigure("card_ce_score", "report card CE score", "higher", number),
    ComparedFigure("card_kl_score", "report card KL score", "higher", number),
    ComparedFigure("card_auc_1", "probing AUC, k = 1", "higher", number),
    ComparedFigure("card_auc_16", "probing AUC, k = 16", "higher", number),
    ComparedFigure("card_f1", "F1, known features", "higher", number),
    ComparedFigure("card_rows", "report card rows", None, count),
)
_OF_NOTES = (
    ComparedFigure("starred", "starred latents", None, count),
    ComparedFigure("named", "named latents", None, count),
    ComparedFigure("explained", "explained latents", None, count),
)
_OF_EXPLANATIONS = (
    ComparedFigure("detection", "detection score", "higher", "{:.3f}".format),
    ComparedFigure("fuzzing", "fuzzing score", "higher", "{:.3f}".format),
)
_OF_RUN = (
    ComparedFigure("loss", LOSS.title, LOSS.better, number),
    ComparedFigure("tokens", "tokens", None, count),
    ComparedFigure("tokens_per_s", "tokens/s", "higher", count),
    ComparedFigure("duration_s", "duration", "lower", duration),
    ComparedFigure("peak_memory_bytes", "peak memory", "lower", gibibytes),
    ComparedFigure("energy_wh", "energy", "lower", watt_hours),
)


# The results that measure SAE quality.
_OF_QUALITY = frozenset(
    {"loss", *(name for metric in result_metrics() for name in with_held_out(metric))}
    | {result.name for result in (*_OF_CARD, *_OF_EXPLANATIONS)}
)


def all_results() -> list[ComparedFigure]:
    """Return the results to compare: metrics (batch and held-out), report card, loss, speed and cost."""
    return [
        *(_of_metric(name, series) for metric, series in result_metrics().items() for name in with_held_out(metric)),
        *_OF_CARD,
        *_OF_NOTES,
        *_OF_EXPLANATIONS,
        *_OF_RUN,
    ]


def results_of(saes: Sequence[ComparedSae]) -> list[ComparedFigure]:
    """Return the results to compare: what programs report, losses first, followed by the other results."""
    programs = [sae for sae in saes if kind_of(sae.job.config).is_program]
    own = own_series(name for sae in programs for name in sae.latest)
    reported = [ComparedFigure(name, title_of(name), _better(name), word_of(name)) for name in own]
    if len(programs) < len(saes):
        return [*reported, *(result for result in all_results() if result.name not in own)]
    rate = ComparedFigure(SPEED, "steps/s", "higher", number)
    others = [result for result in _OF_RUN if result.name not in (*own, "tokens", SPEED)]
    return [*reported, rate, *others] if programs else all_results()


def _better(name: str) -> Literal["lower"] | None:
    """Return "lower" for a held-out loss, and None for a program's other series, whose better direction is unknown."""
    is_held_out = any(word in name.lower() for word in ("val", "test", "eval", "dev"))
    return "lower" if "loss" in name.lower() and is_held_out else None


def _of_metric(name: str, series: Series) -> ComparedFigure:
    return ComparedFigure(name, title_of(name), series.better, word_of(name))


def differences(saes: Sequence[ComparedSae]) -> list[ComparisonRow]:
    """Return a row for each setting that differs; a value is None if the SAE lacks the setting."""
    of_saes = [_settings(sae) for sae in saes]
    paths = list(dict.fromkeys(path for settings in of_saes for path in settings))
    lines = []
    for path in paths:
        values = tuple(settings.get(path) for settings in of_saes)
        recorded = [
            one for one, sae in zip(values, saes, strict=True) if not (_is_imported(sae) and _is_of_training(path))
        ]
        # Compare by repr, since False == 0 in Python.
        if len({repr(value) for value in recorded}) > 1:
            lines.append(ComparisonRow(path, values, word=_value))
    return lines


def _settings(sae: ComparedSae) -> dict[str, Any]:
    all_of_it = {**sae.settings, TOKENS_PER_STEP: _tokens_per_step(sae), "ran as": _ran_as(sae)}
    return {path: value for path, value in all_of_it.items() if not (_is_imported(sae) and _is_of_training(path))}


def _is_of_training(path: str) -> bool:
    return path.startswith(_OF_TRAINING)


def _is_imported(sae: ComparedSae) -> bool:
    """Return True if an SAE comes from another tool and has not been trained further since."""
    return sae.job.state is JobState.IMPORTED


def results(saes: Sequence[ComparedSae], settings: Settings | None = None) -> list[ComparisonRow]:
    """Return a row for each result, final or provisional; with `settings`, also for the energy's price and CO₂."""
    lines = []
    for result in results_of(saes):
        values = tuple(value_of(sae, result.name) for sae in saes)
        if any(value is not None for value in values):
            errors = tuple(_error(sae, result.name) for sae in saes) if result in _OF_EXPLANATIONS else ()
            line = _judged(ComparisonRow(result.title, values, word=result.word, errors=errors), result, saes)
            lines.append(_at_l0(_with_tokens(line, result, saes), result, saes))
    return lines + (_priced(saes, settings) if settings else [])


class ComparedSeeds(msgspec.Struct, frozen=True):
    """SAEs from one run that differ only in the seed, and the spread of each quality result, by name.

    `group` is their label without the seed, or "" if the run has no other SAEs.
    """

    job_id: int
    group: str
    labels: tuple[str, ...]
    spreads: Mapping[str, Spread]

    @property
    def words(self) -> str:
        """The main results as text, like `job 7, k=8, 3 seeds: held-out FVU 0.1460 ± 0.0015, report card FVU …`."""
        n = min((spread.n for name, spread in self.spreads.items() if name in _BY_SEED), default=len(self.labels))
        which = ", ".join(filter(None, [f"job {self.job_id}", self.group, seed_count(n, len(self.labels))]))
        titles = {one.name: one.title for one in all_results()}
        figures = [
            f"{titles[name]} {spread_words(self.spreads[name], series_named(name.removeprefix('card_')))}"
            for name in _BY_SEED
            if name in self.spreads
        ]
        return f"{which}: {', '.join(figures)}"


def over_seeds(saes: Sequence[ComparedSae]) -> list[ComparedSeeds]:
    """Return the SAEs that differ only in the seed, with the spreads of their results."""
    groups: dict[tuple[int, str], dict[str, ComparedSae]] = {}
    for sae in saes:
        groups.setdefault((sae.job.id, without_seed(sae.member)), {})[sae.member] = sae
    found = []
    for (job_id, group), own in groups.items():
        labels = seeds_of(own, next(iter(own)))
        values = {name: [value_of(own[label], name) for label in labels] for name in sorted(_OF_QUALITY)}
        spreads = {
            name: spread
            for name, some in values.items()
            if (spread := spread_of([value for value in some if value is not None]))
        }
        if spreads:
            found.append(ComparedSeeds(job_id, group, tuple(labels), spreads))
    return found


def _priced(saes: Sequence[ComparedSae], settings: Settings) -> list[ComparisonRow]:
    """Return the price and CO₂ emissions for the energy used.

    No value is marked as best, because both rows are computed from the energy.
    """
    energies = [energy_of(sae.job, settings) for sae in saes]
    whole = [energy if is_whole(energy) else Energy() for energy in energies]
    lines = [
        ComparisonRow(
            "price", tuple(energy.cost for energy in whole), word=lambda cost: f"{money(cost)} {settings.currency}"
        ),
        ComparisonRow("CO₂", tuple(energy.co2_g for energy in whole), word=grams),
    ]
    return [line for line in lines if any(value is not None for value in line.values)]


def _judged(line: ComparisonRow, result: ComparedFigure, saes: Sequence[ComparedSae]) -> ComparisonRow:
    """Return the row with the best value marked; for quality results, only finished runs are ranked.

    Values from unfinished runs get a different mark. Values measured on training batches are never marked as best,
    because they are lower than held-out values, and lowest when a run overfits.
    """
    if result.name == "loss" or result.name in held_out_metrics() or not _leads(line.values, result):
        return line
    if result.name in _OF_QUALITY:
        twins = _twins(saes)
        judged = [
            value if is_ranked(sae.job) and place not in twins else None
            for place, (value, sae) in enumerate(zip(line.values, saes, strict=True))
        ]
        unfinished = frozenset(place for place, sae in enumerate(saes) if not is_ranked(sae.job))
        ranked = _marked(msgspec.structs.replace(line, values=tuple(judged)), result, saes)
        return msgspec.structs.replace(ranked, values=line.values, unfinished=unfinished)
    return _marked(line, result, saes)


def _twins(saes: Sequence[ComparedSae]) -> set[int]:
    """Return the indices of SAEs that are random twins of other compared SAEs; a twin is never marked as the best."""
    members = {sae.job.id: [one.member for one in saes if one.job.id == sae.job.id] for sae in saes}
    return {place for place, sae in enumerate(saes) if sae.member not in without_twins(members[sae.job.id])}


def _marked(line: ComparisonRow, result: ComparedFigure, saes: Sequence[ComparedSae]) -> ComparisonRow:
    """Return the row with the best value marked; if others are not significantly worse, mark it and them as equal."""
    if len({sae.member for sae in saes if names_layer(sae.member)}) > 1:
        # The layers of a cross-layer transcoder have different targets.
        return line
    explainers = {sae.explained_by for sae in saes if sae.explained_by}
    if result in _OF_EXPLANATIONS and len(explainers) > 1:
        names = join_words(sorted(f"{', '.join(models)} ({', '.join(prompts)})" for models, prompts in explainers))
        return msgspec.structs.replace(line, why=f"{line.title}: not ranked, since different models explain: {names}")
    leads = leads_of_best(line.values, result, saes)
    alike = {place: lead for place, lead in leads.items() if not lead.is_real}
    if not alike:
        return msgspec.structs.replace(line, best=_best_as_shown(line.values, result))
    top = min(best(line.values, result.better))
    # If an SAE does not differ significantly from the best SAE, neither do the SAEs ranked between the two.
    farthest = max(lead.lead for lead in alike.values())
    alike |= {place: lead for place, lead in leads.items() if lead.lead <= farthest}
    return msgspec.structs.replace(line, same=frozenset({top, *alike}), why=_why(line, saes, top, alike))


def _at_l0(line: ComparisonRow, result: ComparedFigure, saes: Sequence[ComparedSae]) -> ComparisonRow:
    """Return an FVU row with a note on the L0 values if they differ by more than `MOST_L0_MISS`."""
    if result.name not in _L0_OF:
        return line
    l0s = {sae.label: l0 for sae in saes if (l0 := value_of(sae, _L0_OF[result.name])) is not None}
    if not l0s or max(l0s.values()) <= (1 + MOST_L0_MISS) * min(l0s.values()):
        return line
    each = join_words([f"{label} at {l0:.1f}" for label, l0 in l0s.items()])
    unequal = f"the L0 values differ, and a higher L0 alone lowers the {line.title}: {each}"
    return msgspec.structs.replace(line, why="; ".join(filter(None, (line.why, unequal))))


def _with_tokens(line: ComparisonRow, result: ComparedFigure, saes: Sequence[ComparedSae]) -> ComparisonRow:
    """Return a quality row, noting the best SAE's training token count if the counts differ."""
    tokens = [sae.job.tokens for sae in saes]
    trained = [n for n in tokens if n]
    if not line.best or result in _OF_RUN[1:] or max(trained, default=0) <= LIKE * min(trained, default=0):
        return line
    return msgspec.structs.replace(line, notes=tuple(f" ({count(n)} tokens)" if n else "" for n in tokens))


def _leads(values: Sequence[float | None], result: ComparedFigure) -> bool:
    """Return whether the best value is far enough ahead of the second best; most results have no minimum lead."""
    measured = sorted((value for value in values if value is not None), reverse=result.better == "higher")
    if result.name not in LEAST_LEAD or len(measured) < 2:
        return True
    first, second = measured[:2]
    return abs(first - second) > LEAST_LEAD[result.name] * abs(second)


def _error(sae: ComparedSae, name: str) -> float | None:
    """Return the standard error of a result, or None if unknown.

    For the fraction of dead latents, this is the binomial standard error.
    """
    if name != "dead_fraction":
        return sae.latest.get(error_of(name))
    dead, d_sae = value_of(sae, name), _d_sae(sae)
    return math.sqrt(dead * (1 - dead) / d_sae) if d_sae and dead is not None and 0 <= dead <= 1 else None


def _d_sae(sae: ComparedSae) -> int | None:
    own, expansion = sae.settings.get("sae.d_sae"), sae.settings.get("sae.expansion_factor")
    if isinstance(own, int):
        return own
    return round(expansion * sae.job.d_in) if isinstance(expansion, int | float) and sae.job.d_in else None


def best(values: Sequence[float | None], better: str | None) -> frozenset[int]:
    """Return the indices of the best values, or an empty set if all are equal."""
    measured = [value for value in values if value is not None]
    if not better or len(set(measured)) < 2:
        return frozenset()
    top = min(measured) if better == "lower" else max(measured)
    return frozenset(place for place, value in enumerate(values) if value == top)


def leads_of_best(
    values: Sequence[float | None], result: ComparedFigure, saes: Sequence[ComparedSae]
) -> dict[int, Lead]:
    """Return the best value's lead over each other value with known noise, by the other value's index."""
    top = min(best(values, result.better), default=None)
    if top is None:
        return {}
    measured = [SaeResult(sae, value, _error(sae, result.name)) for sae, value in zip(saes, values, strict=True)]
    leads = {
        place: lead_of(result.name, measured[top], one, measured) for place, one in enumerate(measured) if place != top
    }
    return {place: lead for place, lead in leads.items() if lead}


def _why(line: ComparisonRow, saes: Sequence[ComparedSae], top: int, leads: dict[int, Lead]) -> str:
    """Return a sentence stating the largest insignificant lead, the significance threshold, and its reason."""
    farthest = max(leads, key=lambda place: leads[place].lead)
    lead, names = leads[farthest], join_words([saes[place].label for place in sorted({top, *leads})])
    counts = (
        f"only a lead above {number(lead.least)} is significant"
        if math.isfinite(lead.least)
        else "no lead is significant"
    )
    return (
        f"{line.title}: {names} are considered equal; {saes[top].label} leads by {number(lead.lead)}, but "
        f"{counts}: {lead.why}"
    )


def _best_as_shown(values: Sequence[float | None], result: ComparedFigure) -> frozenset[int]:
    """Return the indices of values displayed the same as the best one, or an empty set if all look the same."""
    words = [None if value is None else result.word(value) for value in values]
    top = {words[place] for place in best(values, result.better)}
    if len(set(words) - {None}) < 2:
        return frozenset()
    return frozenset(place for place, word in enumerate(words) if word in top)


def value_of(sae: ComparedSae, name: str) -> float | None:
    """Return a result by name; for an SAE from a sweep, return its own value if it has one."""
    if name == "duration_s":
        return _duration_s(sae)
    if name == "energy_wh":
        # A partial measurement would look like lower consumption.
        energy = energy_of(sae.job, Settings())
        return energy.energy_wh if is_whole(energy) else None
    if name in sae.latest:
        return sae.latest[name]
    is_of_sae = name == "loss" or name in result_metrics()
    value: float | None = None if sae.member and is_of_sae else getattr(sae.job, name, None)
    return value


def _duration_s(sae: ComparedSae) -> float | None:
    job = sae.job
    # For a resumed job, only the last attempt's start and end are known.
    return None if job.started is None or was_resumed(job) else max(0.0, (job.ended or time.time()) - job.started)


def _ran_as(sae: ComparedSae) -> str:
    job = sae.job
    return f"{job.mode}, {job.world_size} × {job.device}"


def _tokens_per_step(sae: ComparedSae) -> int | None:
    """Return the number of tokens per step, which depends on the run's length if the batch size is automatic."""
    return round(sae.job.tokens / sae.job.step) if sae.job.step else None


def _value(value: Any) -> str:
    """Return a setting's value as written in the job file, but without quotes around strings."""
    return value if isinstance(value, str) else show(value)

"""Tables that compare runs: the settings in which they differ, and their results with the best of each."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from sae_tui.compare.noise import Lead, Measured, lead_of
from sae_tui.compare.run import Sae
from sae_tui.jobs.energy import Energy, energy_of, grams, is_whole, money, watt_hours
from sae_tui.jobs.states import is_ranked, was_resumed
from sae_tui.settings import Settings
from trainer.contract.runs.recipe import MOST_L0_MISS
from trainer.contract.settings.catalog import Series
from trainer.contract.settings.knobs import show
from trainer.contract.settings.series import (
    LOSS,
    error_of,
    held_out_metrics,
    measure,
    result_metrics,
    series_named,
    title_of,
    with_held_out,
)
from trainer.contract.store.states import JobState
from trainer.contract.wording import count, duration, gibibytes, join_words, number

UNKNOWN = "–"
BEST = "★"
SAME = "same"
UNFINISHED = "unfinished"
# What a machine was at by the way moves speeds and times; a lead of no more than this share is none.
LEAST_LEAD = {"tokens_per_s": 0.05, "duration_s": 0.05, "energy_wh": 0.05}
# FVUs, and the L0 at which each stands.
_L0_OF = {"heldout_fvu": "heldout_l0", "card_fvu": "card_l0"}
# Numbers of tokens are alike up to this factor: a run ends with a whole step.
LIKE = 1.02
# What is compared like a setting: an automatic batch is smaller in a short run.
TOKENS_PER_STEP = "tokens per step"
# Settings that say how a job is trained: of an SAE that was not trained here, nothing.
_OF_TRAINING = ("train.", "parallel.", "launch.", TOKENS_PER_STEP, "ran as")


class Line(msgspec.Struct, frozen=True):
    """A row of a table: a title, a value per SAE, and the places of the best ones, or of the ones called the same.

    `why` says why these are the same, and what else limits the comparison.
    """

    title: str
    values: tuple[Any, ...]
    best: frozenset[int] = frozenset()
    word: Callable[[Any], str] = str
    same: frozenset[int] = frozenset()
    why: str = ""
    # Values of runs that have not finished, which are not ranked.
    unfinished: frozenset[int] = frozenset()
    # Text behind a star, by place: the tokens that the SAE was trained on, where they differ between SAEs.
    notes: tuple[str, ...] = ()

    def words(self, unknown: str = UNKNOWN) -> list[str]:
        """Return the values as text, the best marked, or those that are the same as the best."""
        texts = [unknown if value is None else self.word(value) for value in self.values]
        stars = {place: f" {BEST}{self.notes[place] if self.notes else ''}" for place in self.best}
        known = (place for place in self.unfinished if self.values[place] is not None)
        marks = stars | dict.fromkeys(self.same, f" {SAME}") | dict.fromkeys(known, f" {UNFINISHED}")
        return [f"{text}{marks.get(place, '')}" for place, text in enumerate(texts)]


class Result(msgspec.Struct, frozen=True):
    """A figure by which a run is judged, and which values of it are the better ones; None if neither are."""

    name: str
    title: str
    better: Literal["lower", "higher"] | None
    word: Callable[[Any], str]


def word_of(metric: str) -> Callable[[float], str]:
    """Return the function that formats values of a metric."""
    return functools.partial(measure, series=series_named(metric))


# What an SAE that was trained elsewhere has too, once it is evaluated.
_OF_CARD = (
    Result("card_fvu", "report card FVU", "lower", word_of("fvu")),
    Result("card_l0", "report card L0", None, word_of("l0")),
    # The more rows there are, the fewer latents never fire on them.
    Result("card_dead", "report card did not fire", None, word_of("dead_fraction")),
    Result("card_ce_score", "report card CE score", "higher", number),
    Result("card_kl_score", "report card KL score", "higher", number),
    Result("card_auc_1", "probing AUC, k = 1", "higher", number),
    Result("card_auc_16", "probing AUC, k = 16", "higher", number),
    Result("card_rows", "report card rows", None, count),
)
_OF_RUN = (
    Result("loss", LOSS.title, LOSS.better, number),
    Result("tokens", "tokens", None, count),
    Result("tokens_per_s", "tokens/s", "higher", count),
    Result("duration_s", "duration", "lower", duration),
    Result("peak_memory_bytes", "peak memory", "lower", gibibytes),
    Result("energy_wh", "energy", "lower", watt_hours),
)


# The figures of quality.
_OF_QUALITY = frozenset(
    {"loss", *(name for metric in result_metrics() for name in with_held_out(metric))}
    | {result.name for result in _OF_CARD}
)


def all_results() -> list[Result]:
    """Return the figures by which runs are compared: metrics, also on held-out data, report card, loss, speed, cost."""
    return [
        *(_of_metric(name, series) for metric, series in result_metrics().items() for name in with_held_out(metric)),
        *_OF_CARD,
        *_OF_RUN,
    ]


def _of_metric(name: str, series: Series) -> Result:
    return Result(name, title_of(name), series.better, word_of(name))


def differences(saes: Sequence[Sae]) -> list[Line]:
    """Return a row for each setting that is not the same for all; None for an SAE that does not have it."""
    of_saes = [_settings(sae) for sae in saes]
    paths = list(dict.fromkeys(path for settings in of_saes for path in settings))
    lines = []
    for path in paths:
        values = tuple(settings.get(path) for settings in of_saes)
        told = [one for one, sae in zip(values, saes, strict=True) if not (_is_imported(sae) and _is_of_training(path))]
        # By repr, since False and 0 are equal in Python.
        if len({repr(value) for value in told}) > 1:
            lines.append(Line(path, values, word=_value))
    return lines


def _settings(sae: Sae) -> dict[str, Any]:
    all_of_it = {**sae.settings, TOKENS_PER_STEP: _tokens_per_step(sae), "ran as": _ran_as(sae)}
    return {path: value for path, value in all_of_it.items() if not (_is_imported(sae) and _is_of_training(path))}


def _is_of_training(path: str) -> bool:
    return path.startswith(_OF_TRAINING)


def _is_imported(sae: Sae) -> bool:
    """Return whether an SAE comes from another tool and was not trained further here."""
    return sae.job.state is JobState.IMPORTED


def results(saes: Sequence[Sae], settings: Settings | None = None) -> list[Line]:
    """Return a row for each result of the runs, final or so far; by settings also the price and CO₂ of the energy."""
    lines = []
    for result in all_results():
        values = tuple(value_of(sae, result.name) for sae in saes)
        if any(value is not None for value in values):
            line = _judged(Line(result.title, values, word=result.word), result, saes)
            lines.append(_at_l0(_with_tokens(line, result, saes), result, saes))
    return lines + (_priced(saes, settings) if settings else [])


def _priced(saes: Sequence[Sae], settings: Settings) -> list[Line]:
    """Return the price and CO₂ of the energy; neither says more of which run is better than the energy does."""
    energies = [energy_of(sae.job, settings) for sae in saes]
    whole = [energy if is_whole(energy) else Energy() for energy in energies]
    lines = [
        Line("price", tuple(energy.cost for energy in whole), word=lambda cost: f"{money(cost)} {settings.currency}"),
        Line("CO₂", tuple(energy.co2_g for energy in whole), word=grams),
    ]
    return [line for line in lines if any(value is not None for value in line.values)]


def _judged(line: Line, result: Result, saes: Sequence[Sae]) -> Line:
    """Return the line with the best marked; in quality only a finished run leads, and the others have a mark.

    Values of training batches have no best: they are lower than held-out ones, and most where a run overfits.
    """
    if result.name == "loss" or result.name in held_out_metrics() or not _leads(line.values, result):
        return line
    if result.name in _OF_QUALITY:
        judged = [value if is_ranked(sae.job) else None for value, sae in zip(line.values, saes, strict=True)]
        unfinished = frozenset(place for place, sae in enumerate(saes) if not is_ranked(sae.job))
        ranked = _marked(msgspec.structs.replace(line, values=tuple(judged)), result, saes)
        return msgspec.structs.replace(ranked, values=line.values, unfinished=unfinished)
    return _marked(line, result, saes)


def _marked(line: Line, result: Result, saes: Sequence[Sae]) -> Line:
    """Return the line with the best marked, or with all that are the same as the best."""
    leads = leads_of_best(line.values, result, saes)
    alike = {place: lead for place, lead in leads.items() if not lead.is_real}
    if not alike:
        return msgspec.structs.replace(line, best=_best_as_shown(line.values, result))
    top = min(best(line.values, result.better))
    # An SAE between the best and one that is the same is the same too.
    farthest = max(lead.lead for lead in alike.values())
    alike |= {place: lead for place, lead in leads.items() if lead.lead <= farthest}
    return msgspec.structs.replace(line, same=frozenset({top, *alike}), why=_why(line, saes, top, alike))


def _at_l0(line: Line, result: Result, saes: Sequence[Sae]) -> Line:
    """Return a line of FVUs with a note on the L0 of each, if these differ by more than `MOST_L0_MISS`."""
    if result.name not in _L0_OF:
        return line
    l0s = {sae.label: l0 for sae in saes if (l0 := value_of(sae, _L0_OF[result.name])) is not None}
    if not l0s or max(l0s.values()) <= (1 + MOST_L0_MISS) * min(l0s.values()):
        return line
    each = join_words([f"{label} at {l0:.1f}" for label, l0 in l0s.items()])
    unequal = f"{line.title} is not at equal L0, and a higher L0 alone lowers it: {each}"
    return msgspec.structs.replace(line, why="; ".join(filter(None, (line.why, unequal))))


def _with_tokens(line: Line, result: Result, saes: Sequence[Sae]) -> Line:
    """Return a line on quality with the tokens of the best, if the SAEs were trained on different numbers of tokens."""
    tokens = [sae.job.tokens for sae in saes]
    trained = [n for n in tokens if n]
    if not line.best or result in _OF_RUN[1:] or max(trained, default=0) <= LIKE * min(trained, default=0):
        return line
    return msgspec.structs.replace(line, notes=tuple(f" ({count(n)} tokens)" if n else "" for n in tokens))


def _leads(values: Sequence[float | None], result: Result) -> bool:
    """Tell whether the best value is ahead of the next by as much as this result takes; most take nothing."""
    measured = sorted((value for value in values if value is not None), reverse=result.better == "higher")
    if result.name not in LEAST_LEAD or len(measured) < 2:
        return True
    first, second = measured[:2]
    return abs(first - second) > LEAST_LEAD[result.name] * abs(second)


def _error(sae: Sae, name: str) -> float | None:
    """Return the standard error of a result, where it is known; of a share of latents it is that of a binomial."""
    if name != "dead_fraction":
        return sae.latest.get(error_of(name))
    dead, d_sae = value_of(sae, name), _d_sae(sae)
    return math.sqrt(dead * (1 - dead) / d_sae) if d_sae and dead is not None and 0 <= dead <= 1 else None


def _d_sae(sae: Sae) -> int | None:
    own, expansion = sae.settings.get("sae.d_sae"), sae.settings.get("sae.expansion_factor")
    if isinstance(own, int):
        return own
    return round(expansion * sae.job.d_in) if isinstance(expansion, int | float) and sae.job.d_in else None


def best(values: Sequence[float | None], better: str | None) -> frozenset[int]:
    """Return the places of the best values; none if all are alike."""
    measured = [value for value in values if value is not None]
    if not better or len(set(measured)) < 2:
        return frozenset()
    top = min(measured) if better == "lower" else max(measured)
    return frozenset(place for place, value in enumerate(values) if value == top)


def leads_of_best(values: Sequence[float | None], result: Result, saes: Sequence[Sae]) -> dict[int, Lead]:
    """Return by place the lead of the best value over each other one whose noise is known."""
    top = min(best(values, result.better), default=None)
    if top is None:
        return {}
    measured = [Measured(sae, value, _error(sae, result.name)) for sae, value in zip(saes, values, strict=True)]
    leads = {
        place: lead_of(result.name, measured[top], one, measured) for place, one in enumerate(measured) if place != top
    }
    return {place: lead for place, lead in leads.items() if lead}


def _why(line: Line, saes: Sequence[Sae], top: int, leads: dict[int, Lead]) -> str:
    """Return by how much the best is ahead of the farthest one that is called the same, and which lead would count."""
    farthest = max(leads, key=lambda place: leads[place].lead)
    lead, names = leads[farthest], join_words([saes[place].label for place in sorted({top, *leads})])
    counts = f"only more than {number(lead.least)} counts" if math.isfinite(lead.least) else "no lead counts"
    return (
        f"{line.title}: {names} are the same, as {saes[top].label} is {number(lead.lead)} ahead and "
        f"{counts}: {lead.why}"
    )


def _best_as_shown(values: Sequence[float | None], result: Result) -> frozenset[int]:
    """Return the places of values that read like the best one; none if all read alike."""
    words = [None if value is None else result.word(value) for value in values]
    top = {words[place] for place in best(values, result.better)}
    if len(set(words) - {None}) < 2:
        return frozenset()
    return frozenset(place for place, word in enumerate(words) if word in top)


def value_of(sae: Sae, name: str) -> float | None:
    """Return a result by its name; for an SAE of a sweep its own value where there is one."""
    if name == "duration_s":
        return _duration_s(sae)
    if name == "energy_wh":
        # A part of the energy would look like less of it.
        energy = energy_of(sae.job, Settings())
        return energy.energy_wh if is_whole(energy) else None
    if name in sae.latest:
        return sae.latest[name]
    is_of_sae = name == "loss" or name in result_metrics()
    value: float | None = None if sae.member and is_of_sae else getattr(sae.job, name, None)
    return value


def _duration_s(sae: Sae) -> float | None:
    job = sae.job
    # Of a resumed job only its last attempt is known.
    return None if job.started is None or was_resumed(job) else max(0.0, (job.ended or time.time()) - job.started)


def _ran_as(sae: Sae) -> str:
    job = sae.job
    return f"{job.mode}, {job.world_size} × {job.device}"


def _tokens_per_step(sae: Sae) -> int | None:
    """Return the tokens of a step, which follow from the length of the run where the batch is automatic."""
    return round(sae.job.tokens / sae.job.step) if sae.job.step else None


def _value(value: Any) -> str:
    """Return a setting as it stands in the job file, a string without its quotes."""
    return value if isinstance(value, str) else show(value)

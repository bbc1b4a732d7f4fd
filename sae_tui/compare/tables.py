"""Tables that compare runs: the settings in which they differ, and their results with the best of each."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from sae_tui.compare.run import Sae
from sae_tui.jobs.states import was_resumed
from trainer.contract.settings.catalog import Series
from trainer.contract.settings.knobs import show
from trainer.contract.settings.series import LOSS, error_of, measure, result_metrics, series_named, with_held_out
from trainer.contract.wording import count, duration, gibibytes, number

UNKNOWN = "–"
BEST = "★"
SAME = "same"
# A lead of no more than so many standard errors, those of both values combined, is none.
LEAD = 2.0


class Line(msgspec.Struct, frozen=True):
    """A row of a table: a title, a value per SAE, and the places of the best ones, or of those not told apart."""

    title: str
    values: tuple[Any, ...]
    best: frozenset[int] = frozenset()
    word: Callable[[Any], str] = str
    same: frozenset[int] = frozenset()

    def words(self, unknown: str = UNKNOWN) -> list[str]:
        """Return the values as text, the best marked, or those that are the same as the best."""
        texts = [unknown if value is None else self.word(value) for value in self.values]
        marks = dict.fromkeys(self.best, f" {BEST}") | dict.fromkeys(self.same, f" {SAME}")
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
    Result("card_dead", "report card dead", None, word_of("dead_fraction")),
    Result("card_ce_score", "report card CE score", "higher", number),
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
)


def all_results() -> list[Result]:
    """Return the figures by which runs are compared: metrics, also on held-out data, report card, loss, speed, cost."""
    return [
        *(_of_metric(name, series) for metric, series in result_metrics().items() for name in with_held_out(metric)),
        *_OF_CARD,
        *_OF_RUN,
    ]


def _of_metric(name: str, series: Series) -> Result:
    title = series.title if name in result_metrics() else f"held-out {series.title}"
    return Result(name, title, series.better, word_of(name))


def differences(saes: Sequence[Sae]) -> list[Line]:
    """Return a row for each setting that is not the same for all; None for an SAE that does not have it."""
    of_saes = [{**sae.settings, "ran as": _ran_as(sae)} for sae in saes]
    paths = list(dict.fromkeys(path for settings in of_saes for path in settings))
    lines = [Line(path, tuple(settings.get(path) for settings in of_saes), word=_value) for path in paths]
    # By repr, since False and 0 are equal in Python.
    return [line for line in lines if len({repr(value) for value in line.values}) > 1]


def results(saes: Sequence[Sae]) -> list[Line]:
    """Return a row for each result of the runs, final or so far."""
    lines = []
    for result in all_results():
        values = tuple(value_of(sae, result.name) for sae in saes)
        if any(value is not None for value in values):
            same = same_as_best(values, [sae.latest.get(error_of(result.name)) for sae in saes], result.better)
            top = frozenset() if same else _best_as_shown(values, result)
            lines.append(Line(result.title, values, top, result.word, same))
    return lines


def best(values: Sequence[float | None], better: str | None) -> frozenset[int]:
    """Return the places of the best values; none if all are alike."""
    measured = [value for value in values if value is not None]
    if not better or len(set(measured)) < 2:
        return frozenset()
    top = min(measured) if better == "lower" else max(measured)
    return frozenset(place for place, value in enumerate(values) if value == top)


def same_as_best(values: Sequence[float | None], errors: Sequence[float | None], better: str | None) -> frozenset[int]:
    """Return the places of the best value and of those behind it by less than noise, by their standard errors.

    There are none where the best one leads, or where its error or that of all others is unknown. Errors are taken for
    independent; on the same held-out rows they go together, and a lead may be real that is called none here.
    """
    top = min(best(values, better), default=None)
    if top is None or (of_top := errors[top]) is None:
        return frozenset()
    behind = {
        place
        for place, (value, error) in enumerate(zip(values, errors, strict=True))
        if value is not None
        and error is not None
        and abs(value - (values[top] or 0.0)) <= LEAD * math.hypot(error, of_top)
    }
    return frozenset(behind) if len(behind) > 1 else frozenset()


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


def _value(value: Any) -> str:
    """Return a setting as it stands in the job file, a string without its quotes."""
    return value if isinstance(value, str) else show(value)

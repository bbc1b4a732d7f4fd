"""Reads finished runs, and forecasts the quality of a job's SAEs from them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.view.quality import FEWEST_RUNS, Curve, Estimate, PastRun, Recipe, at_end, doubled, mean_of
from trainer.contract.paths import DataDir
from trainer.contract.planning.rates import full_rate
from trainer.contract.planning.workload import Layout, ranks_of
from trainer.contract.settings.catalog import OPTIMIZERS
from trainer.contract.settings.following import decay_fraction, following_rates
from trainer.contract.settings.job_file import members, parse_job
from trainer.contract.settings.series import CRITERION, held_out
from trainer.contract.settings.toml import table_of
from trainer.contract.store.database import StoreError
from trainer.contract.store.metrics_store import Point, SeriesReader
from trainer.contract.store.rows import DROPPED, Job
from trainer.contract.store.states import JobState
from trainer.contract.wording import plural

# The newest similar SAEs are used, from the newest finished jobs. Reading a job's curve takes 1 ms, and parsing its
# settings another 1 ms.
MOST_RUNS, MOST_JOBS = 30, 100
# The settings that change a run's final FVU, with their names in sentences.
SIZES = {"k": "k", "tokens": "the tokens", "d_sae": "d_sae"}
Series = Mapping[tuple[str, int], Sequence[Point]]


class Forecast(msgspec.Struct, frozen=True):
    """An SAE's expected held-out FVU at the end of its run, and with twice the tokens, k or latents.

    `end` is None if the run has ended or cannot be forecast.
    """

    end: Estimate | None
    doubled: Mapping[str, Estimate]

    @property
    def words(self) -> str:
        """The value expected at the end, or why there is none."""
        if self.end is None:
            return f"too few similar past runs to say; it needs at least {FEWEST_RUNS}"
        return f"held-out FVU {self.end.words} expected at the end, from {plural(self.end.past_runs, 'past run')}"


def mean_forecast(forecasts: Sequence[Forecast]) -> Forecast:
    """Return the mean of the forecasts for several SAEs; leave out what is unknown for one of them."""
    ends = [one.end for one in forecasts if one.end]
    names = [name for name in SIZES if all(name in one.doubled for one in forecasts)]
    twice = {name: mean_of([one.doubled[name] for one in forecasts]) for name in names}
    return Forecast(mean_of(ends) if len(ends) == len(forecasts) else None, twice)


class Forecaster:
    """Forecasts the quality of a job's SAEs from finished jobs; each job's curves are read only once."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self._curves: dict[tuple[int, float | None], dict[str, Curve]] = {}

    def forecasts(self, job: Job, series: Series, jobs: Iterable[Job]) -> dict[str, Forecast]:
        """Return a forecast for each SAE, by label, from `jobs`, sorted newest first.

        Only SAEs that are still training and SAEs of finished runs have one.
        """
        if job.state.is_final and job.state is not JobState.FINISHED:
            return {}
        known = [other for other in jobs if other.state is JobState.FINISHED and other.id != job.id]
        recipes = {
            label: one
            for label, one in recipes_of(job).items()
            if one.total_steps == job.total_steps and (f"{DROPPED}@{label}", 0) not in series
        }
        curves = {label: curve_of(series.get((_stored(label), 0), ()), one) for label, one in recipes.items()}
        return {
            label: self._forecast(recipes[label], curve, known)
            for label, curve in curves.items()
            if curve and (curve[-1][0] == 1 or not job.state.is_final)
        }

    def _forecast(self, recipe: Recipe, curve: Curve, known: Iterable[Job]) -> Forecast:
        past = self.past_runs(recipe, known)
        share, fvu = curve[-1]
        if share < 1:
            end = at_end(recipe, curve, past)
            return Forecast(end, doubled(recipe, end, past) if end else {})
        return Forecast(None, doubled(recipe, Estimate(fvu, fvu, fvu, 1), [*past, PastRun(recipe, curve)]))

    def past_runs(self, recipe: Recipe, known: Iterable[Job]) -> list[PastRun]:
        """Return the newest similar SAEs; a job that was launched twice counts once, since it has the same curve."""
        return list({run.curve: run for run in itertools.islice(self._like(recipe, known), MOST_RUNS)}.values())

    def _like(self, recipe: Recipe, known: Iterable[Job]) -> Iterator[PastRun]:
        for job in itertools.islice(known, MOST_JOBS):
            for label, one in recipes_of(job).items():
                if one.is_like(recipe) and (curve := self.curves_of(job).get(label)):
                    yield PastRun(one, curve)

    def curves_of(self, job: Job) -> dict[str, Curve]:
        """Return the curves of a finished job's SAEs; leave out SAEs that diverged or ended before the planned step."""
        key = job.id, job.ended
        if key not in self._curves:
            self._curves[key] = {}
            with contextlib.suppress(StoreError):
                self._curves[key] = _read_curves(self._data.run(job.id).metrics_db, recipes_of(job))
        return self._curves[key]


def recipes_of(job: Job) -> Mapping[str, Recipe]:
    """Return the recipes of a training job's SAEs, by label; {} if the job is of another kind or cannot be read."""
    return {} if job.d_in is None else _recipes(job.config, job.d_in, job.d_out, job.world_size)


@functools.lru_cache(maxsize=2 * MOST_JOBS)
def _recipes(config: str, d_in: int, d_out: int | None, devices: int) -> Mapping[str, Recipe]:
    job, _ = parse_job(table_of(config))
    if job is None:
        return {}
    return {
        label: _recipe(Layout(one, ranks_of(one, devices)), d_in, is_transcoder=d_out is not None)
        for label, one in members(job).items()
    }


def _recipe(layout: Layout, d_in: int, *, is_transcoder: bool) -> Recipe:
    sae, train, d_sae = layout.job.sae, layout.job.train, layout.job.sae.width(d_in)
    automatic = msgspec.structs.replace(
        layout, job=layout.job.replace("train", lr="auto", lr_scaling="auto", lr_length="auto")
    )
    rates = [full_rate(one, d_sae, is_transcoder=is_transcoder) for one in (layout, automatic)]
    follows = following_rates(layout.job, is_transcoder=is_transcoder) is not None
    falls = 0.0 if OPTIMIZERS[train.optimizer].averages else decay_fraction(layout.job, is_transcoder=is_transcoder)
    return Recipe(
        kind=(sae.architecture, sae.freeze, train.optimizer, follows, train.warmup_fraction, falls),
        lr=rates[0] / rates[1],
        data=repr(layout.job.data),
        total_steps=layout.total_steps,
        sizes={"k": sae.settings.n_active, "tokens": layout.total_tokens, "d_sae": d_sae},
    )


def curve_of(points: Sequence[Point], recipe: Recipe) -> Curve:
    """Return a held-out curve, without evaluations before the first step; () if the newest value shows a divergence."""
    if not points or points[-1].value is None or not 0 < points[-1].value < 1:
        return ()
    known = ((point.step / recipe.total_steps, point.value) for point in points if point.step)
    return tuple((share, value) for share, value in known if value is not None and value > 0)


def _read_curves(path: Path, recipes: Mapping[str, Recipe]) -> dict[str, Curve]:
    with contextlib.closing(SeriesReader(path)) as reader:
        curves = {label: curve_of(reader.points(_stored(label)), one) for label, one in recipes.items()}
    return {label: curve for label, curve in curves.items() if curve and curve[-1][0] == 1}


def _stored(label: str) -> str:
    """Return the name of an SAE's held-out FVU in its run's store."""
    return f"{held_out(CRITERION)}@{label}" if label else held_out(CRITERION)

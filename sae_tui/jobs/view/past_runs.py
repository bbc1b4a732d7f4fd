"""Reads finished runs, and forecasts the quality of a job's SAEs from them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sae_tui.jobs.view.quality import (
    FEWEST_RUNS,
    Curve,
    FvuEstimate,
    PastRun,
    QualityRecipe,
    at_end,
    doubled,
    mean_of,
    since_rise,
    thinned,
)
from sae_tui.jobs.view.reader import JobView
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
# The number of points kept of a past curve, which take 12 kB.
MOST_POINTS = 100
# The settings that change a run's final FVU, with their names in sentences.
SIZES = {"k": "k", "tokens": "the tokens", "d_sae": "d_sae"}
Series = Mapping[tuple[str, int], Sequence[Point]]


class QualityForecast(msgspec.Struct, frozen=True):
    """An SAE's expected held-out FVU at the end of its run, and with twice the tokens, k or latents.

    `end` is None if the run has ended or cannot be forecast.
    """

    end: FvuEstimate | None
    doubled: Mapping[str, FvuEstimate]

    @property
    def words(self) -> str:
        """The value expected at the end, or the reason why there is no forecast."""
        if self.end is None:
            return f"no forecast from the past runs here; it needs at least {FEWEST_RUNS} similar ones"
        return f"held-out FVU {self.end.words} expected at the end, from {plural(self.end.past_runs, 'past run')}"


def mean_forecast(forecasts: Sequence[QualityForecast]) -> QualityForecast:
    """Return the mean of the forecasts for several SAEs; leave out values that one of them lacks."""
    ends = [one.end for one in forecasts if one.end]
    names = [name for name in SIZES if all(name in one.doubled for one in forecasts)]
    twice = {name: mean_of([one.doubled[name] for one in forecasts]) for name in names}
    return QualityForecast(mean_of(ends) if len(ends) == len(forecasts) else None, twice)


class Forecaster:
    """Forecasts the quality of a job's SAEs from finished jobs; reads and computes only if something is new."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self._known: object = None
        self._found: dict[str, QualityForecast] = {}
        # The similar SAEs in each finished job, and the recipes that they are similar to.
        self._runs: dict[tuple[int, float | None], list[PastRun]] = {}
        self._recipes: Sequence[QualityRecipe] = ()
        # The jobs whose metrics cannot be read, with the reason.
        self.unread: dict[int, str] = {}

    def forecasts(self, job: JobView, series: Series, jobs: Iterable[Job]) -> Mapping[str, QualityForecast]:
        """Return a forecast for each SAE, by label, from `jobs`, sorted newest first.

        Only SAEs that are still training and SAEs of finished runs have one.
        """
        is_finished = job.state is JobState.FINISHED
        if not is_finished and (job.state.is_final or job.stop_requested or job.error):
            return {}
        recipes = {
            label: one
            for label, one in recipes_of(job).items()
            if one.total_steps == job.total_steps and (_stored(DROPPED, label), 0) not in series
        }
        others = (one for one in jobs if one.state is JobState.FINISHED and one.d_in is not None and one.id != job.id)
        past = list(itertools.islice(others, MOST_JOBS))
        newest = {label: _newest(series, label) for label in recipes}
        known = job.id, job.state, recipes, newest, [(one.id, one.ended) for one in past]
        if known != self._known:
            # If this fails, it is not repeated until something is new.
            self._known, self._found = known, {}
            own = {label: PastRun(one, curve_of(newest[label], one)) for label, one in recipes.items()}
            self._found = self._new(self._complete(job, recipes) if is_finished else own, past)
        return self._found

    def _complete(self, job: Job, recipes: Mapping[str, QualityRecipe]) -> Mapping[str, PastRun]:
        """Return a finished job's SAEs from its store, since `series` contains means if the curve is long."""
        with self._noting_unread(job):
            return read_runs(self._data.run(job.id).metrics_db, recipes)
        return {}

    @contextlib.contextmanager
    def _noting_unread(self, job: Job) -> Iterator[None]:
        """Leave out a job whose metrics cannot be read, and note the reason unless the user has deleted the file."""
        try:
            yield
        except StoreError as error:
            if self._data.run(job.id).metrics_db.exists():
                self.unread[job.id] = str(error)

    def _new(self, own: Mapping[str, PastRun], jobs: Iterable[Job]) -> dict[str, QualityForecast]:
        past = self._past_runs({label: run.recipe for label, run in own.items()}, jobs)
        return {label: _forecast(run, past[label]) for label, run in own.items() if run.curve}

    def _past_runs(self, recipes: Mapping[str, QualityRecipe], jobs: Iterable[Job]) -> dict[str, list[PastRun]]:
        """Return the newest SAEs similar to each recipe, by label; keep only these jobs' curves in memory.

        A job that was launched twice counts once, since it has the same curve.
        """
        old, self._runs = self._runs if self._recipes == [*recipes.values()] else {}, {}
        self._recipes = [*recipes.values()]
        found: dict[str, dict[Curve, PastRun]] = {label: {} for label in recipes}
        for job in jobs:
            if all(len(runs) >= MOST_RUNS for runs in found.values()):
                break
            key = job.id, job.ended
            with self._noting_unread(job):
                self._runs[key] = old[key] if key in old else self._similar(job)
            for run, (label, one) in itertools.product(self._runs.get(key, ()), recipes.items()):
                if run.recipe.is_like(one) and len(found[label]) < MOST_RUNS:
                    found[label].setdefault(run.curve, run)
        return {label: list(runs.values()) for label, runs in found.items()}

    def _similar(self, job: Job) -> list[PastRun]:
        wanted = {
            label: one for label, one in recipes_of(job).items() if any(one.is_like(other) for other in self._recipes)
        }
        return list(read_runs(self._data.run(job.id).metrics_db, wanted).values()) if wanted else []


def _forecast(run: PastRun, past: Sequence[PastRun]) -> QualityForecast:
    """Forecast a run, which is complete or has only its newest value."""
    if run.curve[-1][0] < 1:
        end = at_end(run.recipe, run.curve, past)
        return QualityForecast(end, doubled(run.recipe, end, past) if end else {})
    now = FvuEstimate(run.final, run.final, run.final, 1)
    return QualityForecast(None, doubled(run.recipe, now, [*(one for one in past if one.curve != run.curve), run]))


def _newest(series: Series, label: str) -> Sequence[Point]:
    """Return the newest held-out FVU, or () if the learning rate has doubled since: the run was made longer."""
    newest = series.get((_stored(held_out(CRITERION), label), 0), ())[-1:]
    rates = series.get((_stored("lr", label), 0), ())
    then = next((one.value for one in reversed(rates) if newest and one.step <= newest[0].step), None)
    return () if then and (rates[-1].value or 0) > 2 * then else newest


def recipes_of(job: Job) -> Mapping[str, QualityRecipe]:
    """Return the recipes of a training job's SAEs, by label; {} if the job is of another kind or cannot be read."""
    return {} if job.d_in is None else _recipes(job.config, job.d_in, job.d_out, job.world_size)


@functools.lru_cache(maxsize=2 * MOST_JOBS)
def _recipes(config: str, d_in: int, d_out: int | None, devices: int) -> Mapping[str, QualityRecipe]:
    job, _ = parse_job(table_of(config))
    if job is None:
        return {}
    found = {
        label: _recipe(Layout(one, ranks_of(one, devices)), d_in, is_transcoder=d_out is not None)
        for label, one in members(job).items()
    }
    return {label: one for label, one in found.items() if one}


def _recipe(layout: Layout, d_in: int, *, is_transcoder: bool) -> QualityRecipe | None:
    """Return an SAE's recipe, or None without latents, or if a fixed penalty determines L0."""
    sae, train, d_sae = layout.job.sae, layout.job.train, layout.job.sae.width(d_in)
    if d_sae < 1 or sae.settings.target_l0 is None:
        return None
    automatic = msgspec.structs.replace(
        layout, job=layout.job.replace("train", lr="auto", lr_scaling="auto", lr_length="auto")
    )
    rates = [full_rate(one, d_sae, is_transcoder=is_transcoder) for one in (layout, automatic)]
    settings = msgspec.structs.asdict(sae.settings) | {"k": None}
    follows = following_rates(layout.job, is_transcoder=is_transcoder) is not None
    falls = 0.0 if OPTIMIZERS[train.optimizer].averages else decay_fraction(layout.job, is_transcoder=is_transcoder)
    return QualityRecipe(
        kind=(
            *(sae.architecture, *settings.values(), sae.normalize, sae.skip, is_transcoder, sae.freeze),
            *(train.optimizer, follows, train.warmup_fraction, falls),
        ),
        lr=rates[0] / rates[1],
        data=repr(layout.job.data),
        total_steps=layout.total_steps,
        sizes={"k": sae.settings.n_active, "tokens": layout.total_tokens, "d_sae": d_sae},
    )


def curve_of(points: Sequence[Point], recipe: QualityRecipe) -> Curve:
    """Return a held-out curve, without evaluations before the first step; () if the newest value shows a divergence."""
    if not points or points[-1].value is None or not 0 < points[-1].value < 1:
        return ()
    known = ((point.step / recipe.total_steps, point.value) for point in points if point.step)
    return tuple((share, value) for share, value in known if value is not None and value > 0)


def read_runs(path: Path, recipes: Mapping[str, QualityRecipe]) -> dict[str, PastRun]:
    """Return a finished job's SAEs, by label; leave out SAEs that diverged or ended before the planned step."""
    with contextlib.closing(SeriesReader(path)) as reader:
        curves = {
            label: thinned(since_rise(curve_of(reader.points(_stored(held_out(CRITERION), label)), one)), MOST_POINTS)
            for label, one in recipes.items()
        }
    return {label: PastRun(recipes[label], curve) for label, curve in curves.items() if curve and curve[-1][0] == 1}


def _stored(name: str, label: str) -> str:
    """Return the name of an SAE's metric in its run's store."""
    return f"{name}@{label}" if label else name

"""Measures the quality forecast on the finished runs in a data folder, leaving out one run at a time.

    PYTHONPATH=. python tests/benchmarks/forecast.py DATA_FOLDER [--past N]

For each SAE and each share of its steps, the final held-out FVU is forecast from the curve up to this point and from
the other runs. The first table shows the median of the absolute relative errors, the median relative half-width of the
80 % bands, and how many of them contain the final value. It also shows the error if the last value is taken as the
final value, and if the curve is extrapolated with a power law of the steps. With `--past`, each forecast uses only N of
the other runs, drawn at random 20 times.

The second table compares runs on the same data that differ only by a factor of 2 in one setting (and in the seed): the
larger run is forecast from all other runs.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from sae_tui.jobs.view.past_runs import read_runs, recipes_of
from sae_tui.jobs.view.quality import Curve, FvuEstimate, PastRun, at_end, doubled, least_squares
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

SHARES = (0.25, 0.5, 0.75)
DRAWS = 20


class Outcome(NamedTuple):
    """An estimate and the true value."""

    estimate: FvuEstimate
    true: float

    @property
    def error(self) -> float:
        return abs(self.estimate.heldout_fvu / self.true - 1)

    @property
    def is_covered(self) -> bool:
        return self.estimate.low <= self.true <= self.estimate.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--past", type=int, help="number of other runs for each forecast; default: all")
    options = parser.parse_args()
    runs, console = list(all_runs(DataDir(options.folder))), Console()
    console.print(f"{len(runs)} runs", table_of_ends(runs, options.past), table_of_doubled(runs))


def all_runs(data: DataDir) -> Iterator[PastRun]:
    for job in Control(data.control_db, readonly=True).jobs([JobState.FINISHED]):
        yield from read_runs(data.run(job.id).metrics_db, recipes_of(job)).values()


def like(run: PastRun, runs: Iterable[PastRun]) -> list[PastRun]:
    return [other for other in runs if other is not run and other.recipe.is_like(run.recipe)]


def table_of_ends(runs: Sequence[PastRun], n_past: int | None) -> Table:
    table = Table("of the run", "forecasts", "error", "half-width", "in band", "last value stays", "power law")
    rng = random.Random(0)
    for share in SHARES:
        found: list[Outcome] = []
        stays, powers, n_asked = [], [], 0
        for run in runs:
            curve = tuple(point for point in run.curve if point[0] <= share + 1e-9)
            others = like(run, runs)
            for _ in range(DRAWS if n_past else 1):
                past = rng.sample(others, min(n_past, len(others))) if n_past else others
                n_asked += 1
                if estimate := at_end(run.recipe, curve, past):
                    found.append(Outcome(estimate, run.final))
                    stays.append(abs(curve[-1][1] / run.final - 1))
                    powers.append(abs(power_law(curve) / run.final - 1))
        table.add_row(f"{share:.0%}", f"{len(found)} of {n_asked}", *words(found), *map(_percent, (stays, powers)))
    return table


def power_law(curve: Curve) -> float:
    """Return the final value according to a power law through the second half of a curve."""
    points = [(math.log(share), math.log(fvu)) for share, fvu in curve[-max(3, len(curve) // 2) :]]
    fit = least_squares([[share] for share, _ in points], [fvu for _, fvu in points])
    return math.exp(fit.mean - fit.slopes[0] * fit.means[0]) if fit else curve[-1][1]


def table_of_doubled(runs: Sequence[PastRun]) -> Table:
    table = Table("twice", "pairs", "error", "half-width", "in band", "nothing changes")
    for name in runs[0].recipe.sizes:
        found, stays = [], []
        for small, large in pairs(runs, name):
            now = FvuEstimate(small.final, small.final, small.final, 1)
            past = [run for run in like(small, runs) if run is not large]
            if estimate := doubled(small.recipe, now, [*past, small]).get(name):
                found.append(Outcome(estimate, large.final))
                stays.append(abs(small.final / large.final - 1))
        if found:
            table.add_row(name, str(len(found)), *words(found), _percent(stays))
    return table


def pairs(runs: Sequence[PastRun], name: str) -> Iterator[tuple[PastRun, PastRun]]:
    """Yield the pairs of runs that differ only in one setting, by a factor of 2 (up to the rounding of steps)."""
    for small in runs:
        for large in like(small, runs):
            factors = {other: value / small.recipe.sizes[other] for other, value in large.recipe.sizes.items()}
            is_twice = abs(factors.pop(name) - 2) < 0.02
            if large.recipe.data == small.recipe.data and is_twice and set(factors.values()) == {1}:
                yield small, large


def words(found: Sequence[Outcome]) -> list[str]:
    halves = [math.log(one.estimate.high / one.estimate.low) / 2 for one in found]
    covered = f"{fmean(one.is_covered for one in found):.0%}" if found else "–"
    return [_percent([one.error for one in found]), _percent(halves), covered]


def _percent(values: Sequence[float]) -> str:
    return f"{median(values):.1%}" if values else "–"


if __name__ == "__main__":
    main()

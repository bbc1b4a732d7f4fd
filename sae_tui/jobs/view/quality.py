"""Forecasts an SAE's held-out FVU from past runs: at the end of its run, and with twice the tokens, k or latents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from trainer.contract.store.seeds import mean as fmean

# The held-out FVU as pairs (share of the run's steps, FVU).
Curve = tuple[tuple[float, float], ...]

# The share of bands that contain the true value.
BAND = 0.8
# The minimum number of runs beyond the number of a fit's parameters, and so the minimum number of past runs.
SPARE_RUNS = 2
FEWEST_RUNS = 1 + SPARE_RUNS
# A fit contains a setting if its values span this factor. Of the other settings, similar runs differ at most by it.
SPAN = 2.0
# Learning rates are similar up to this factor. At twice the learning rate, the decay reduced the FVU by 27 % instead of
# 18 %; at a third, by 11 %.
RATE_SPAN = 1.5
# A run that was made longer after its decay rises by more than this factor when the learning rate rises again: by 14 %
# in a run of 147 steps. The curves of 47 SAEs never rose by more than 0.1 %.
RISE = 1.03


class QualityRecipe(msgspec.Struct, frozen=True):
    """The settings of an SAE that its held-out FVU depends on.

    Forecasts use only past runs of the same `kind`, which contains the architecture, the optimizer and the schedule.
    `lr` is the learning rate relative to the automatic one. The order of `sizes` (names and values) is the order in
    which a fit adds settings: the effect of the decay depends most on k.
    """

    kind: tuple[object, ...]
    lr: float
    data: str
    total_steps: int
    sizes: Mapping[str, float]

    def is_like(self, other: QualityRecipe) -> bool:
        """Return whether the schedule and the learning rate of an SAE are similar."""
        return self.kind == other.kind and _within(self.lr, other.lr, RATE_SPAN)


class PastRun(msgspec.Struct, frozen=True):
    """An SAE from a finished run."""

    recipe: QualityRecipe
    curve: Curve

    @property
    def final(self) -> float:
        return self.curve[-1][1]


class FvuEstimate(msgspec.Struct, frozen=True):
    """An expected held-out FVU, its 80 % band, and the number of past runs on which both are based."""

    heldout_fvu: float
    low: float
    high: float
    past_runs: int

    @property
    def words(self) -> str:
        """The value and its band, such as `0.171 (0.168–0.175)`."""
        return f"{self.heldout_fvu:#.3g} ({self.low:#.3g}–{self.high:#.3g})"


class Fit(msgspec.Struct, frozen=True):
    """A linear least-squares fit with a constant; `inverse` is the inverse of its centred normal matrix."""

    n: int
    means: tuple[float, ...]
    mean: float
    slopes: tuple[float, ...]
    inverse: tuple[tuple[float, ...], ...]
    residual: float  # the standard deviation of the residuals

    @property
    def quantile(self) -> float:
        """Half the width of a band, in standard errors."""
        return t_quantile((1 + BAND) / 2, self.n - 1 - len(self.slopes))

    def predict(self, x: Sequence[float]) -> tuple[float, float]:
        """Return the expected value at `x`, and half the width of the band for a new value."""
        off = [one - mean for one, mean in zip(x, self.means, strict=True)]
        error = math.sqrt(1 + 1 / self.n + sum(a * _product(b, off) for a, b in zip(off, self.inverse, strict=True)))
        return self.mean + _product(self.slopes, off), self.quantile * self.residual * error


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> Fit | None:
    """Fit the values by a constant and the columns of `rows`; return None if these do not determine the fit."""
    means, mean = tuple(map(fmean, zip(*rows, strict=True))), fmean(values)
    centred = [[one - of_all for one, of_all in zip(row, means, strict=True)] for row in rows]
    columns = list(zip(*centred, strict=True))
    inverse = inverted([[_product(a, b) for b in columns] for a in columns])
    degrees = len(values) - 1 - len(means)
    if inverse is None or degrees < 1:
        return None
    moments = [_product(column, values) for column in columns]
    slopes = tuple(_product(row, moments) for row in inverse)
    squares = sum((value - mean - _product(row, slopes)) ** 2 for row, value in zip(centred, values, strict=True))
    return Fit(len(values), means, mean, slopes, inverse, math.sqrt(squares / degrees))


def inverted(matrix: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...] | None:
    """Return the inverse of a positive definite matrix by Gauss-Jordan elimination, or None if it is singular."""
    n = len(matrix)
    rows = [[*row, *(float(i == j) for j in range(n))] for i, row in enumerate(matrix)]
    for i, own in enumerate(matrix):
        if rows[i][i] <= 1e-9 * own[i]:
            return None
        rows[i] = [value / rows[i][i] for value in rows[i]]
        for j in set(range(n)) - {i}:
            rows[j] = [a - rows[j][i] * b for a, b in zip(rows[j], rows[i], strict=True)]
    return tuple(tuple(row[n:]) for row in rows)


def t_quantile(p: float, degrees: int) -> float:
    """Return a quantile of Student's t distribution, by an expansion around the normal distribution (Hill 1970).

    For p = 0.9, the error is below 0.1 % from 3 degrees of freedom. A single degree is computed exactly.
    """
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    from statistics import NormalDist

    z = NormalDist().inv_cdf(p)
    powers = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term * float(degrees) ** -power for power, term in enumerate(powers))


def at_end(recipe: QualityRecipe, curve: Curve, past: Iterable[PastRun]) -> FvuEstimate | None:
    """Forecast the last value of a curve, or return None if there are too few similar past runs.

    The last value relative to the current value is taken from past runs at the same share of their steps, because the
    FVU falls most while the learning rate decays. The curve itself is not extrapolated.
    """
    if not curve:
        return None
    share, now = curve[-1]
    gains = [(run.recipe, math.log(run.final) - math.log(then)) for run in past if (then := value_at(run.curve, share))]
    varying = _varying(recipe, [one for one, _ in gains])
    for n in range(len(varying), -1, -1):
        names = varying[:n]
        like = [(one, gain) for one, gain in gains if _are_similar(one, recipe, without=names)]
        recipes = [one for one, _ in like]
        if len(like) <= n + SPARE_RUNS or not set(names) <= set(_varying(recipe, recipes)):
            continue
        fit = least_squares([_logs(one, names) for one in recipes], [gain for _, gain in like])
        if fit and _is_inside(recipe, recipes, names, SPAN):
            return _estimate(math.log(now), *fit.predict(_logs(recipe, names)), len(like))
    return None


def doubled(recipe: QualityRecipe, base: FvuEstimate, past: Iterable[PastRun]) -> dict[str, FvuEstimate]:
    """Return the held-out FVU expected with twice each setting, by a power law fitted to finished runs on this data.

    `base` is the final FVU with the present settings. A setting is left out if its values in past runs span less than
    `SPAN`, or if the present value is outside their range; all are left out if there are too few runs.
    """
    runs = [run for run in past if run.recipe.data == recipe.data]
    recipes = [run.recipe for run in runs]
    names = _varying(recipe, recipes)
    if not names or len(runs) <= len(names) + SPARE_RUNS:
        return {}
    fit = least_squares([_logs(one, names) for one in recipes], [math.log(run.final) for run in runs])
    if fit is None:
        return {}
    center, spread = math.log(base.heldout_fvu), math.log(base.high / base.low) / 2
    found = {}
    for i, name in enumerate(names):
        if _is_inside(recipe, recipes, [name], 1.0):
            # Both runs deviate from the law, but in part alike: with the residual of one run, 82 % of the bands in
            # docs/quality.md contained the true value, and with the residuals of two runs 97 %.
            own = fit.quantile * fit.residual * math.sqrt(1 + math.log(2) ** 2 * fit.inverse[i][i])
            found[name] = _estimate(center, fit.slopes[i] * math.log(2), math.hypot(spread, own), len(runs))
    return found


def value_at(curve: Curve, share: float) -> float | None:
    """Return a curve's value at a share of the steps, interpolated on logarithmic axes; None outside the curve."""
    for (before, first), (after, second) in itertools.pairwise(curve):
        if before <= share <= after:
            weight = math.log(share / before) / math.log(after / before)
            return float(first ** (1 - weight) * second**weight)
    return None


def since_rise(curve: Curve) -> Curve:
    """Return a curve from its last clear rise on: before it, the run followed another schedule or another penalty."""
    rises = [i for i, (before, after) in enumerate(itertools.pairwise(curve), 1) if after[1] > RISE * before[1]]
    return curve[rises[-1] :] if rises else curve


def thinned(curve: Curve, most: int) -> Curve:
    """Return at most `most` points of a curve, with the first and the last, evenly distributed."""
    if len(curve) <= most:
        return curve
    return tuple(curve[i * (len(curve) - 1) // (most - 1)] for i in range(most))


def mean_of(estimates: Sequence[FvuEstimate]) -> FvuEstimate:
    """Return the mean of the estimates for several SAEs; the limits of the bands are averaged too."""
    means = [fmean(each) for each in zip(*((e.heldout_fvu, e.low, e.high) for e in estimates), strict=True)]
    return FvuEstimate(means[0], means[1], means[2], min(one.past_runs for one in estimates))


def _estimate(start: float, change: float, half: float, n: int) -> FvuEstimate:
    middle = start + change
    return FvuEstimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half), n)


def _varying(recipe: QualityRecipe, others: Sequence[QualityRecipe]) -> list[str]:
    """Return the settings whose values in other SAEs span `SPAN`."""
    values = {name: [one.sizes[name] for one in others] for name in recipe.sizes}
    return [name for name, own in values.items() if own and max(own) >= SPAN * min(own)]


def _are_similar(one: QualityRecipe, other: QualityRecipe, without: Sequence[str]) -> bool:
    return all(_within(one.sizes[name], other.sizes[name], SPAN) for name in one.sizes if name not in without)


def _is_inside(recipe: QualityRecipe, others: Sequence[QualityRecipe], names: Iterable[str], margin: float) -> bool:
    """Return whether these settings are within the range of other SAEs, widened by a factor on both sides."""
    ranges = {name: [one.sizes[name] for one in others] for name in names}
    return all(min(own) / margin <= recipe.sizes[name] <= margin * max(own) for name, own in ranges.items())


def _within(a: float, b: float, factor: float) -> bool:
    return max(a, b) <= factor * min(a, b)


def _logs(recipe: QualityRecipe, names: Iterable[str]) -> list[float]:
    return [math.log(recipe.sizes[name]) for name in names]


def _product(a: Iterable[float], b: Iterable[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))

"""Converts curves into traces to draw: smoothed values against the chosen x axis, on a linear or logarithmic y axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import msgspec

from sae_tui.compare.run import Curve, Sample
from trainer.contract.settings.series import CRITERION, held_out

# Maps each x axis option to the axis title in images.
AXES = {"step": "step", "tokens": "tokens", "time": "seconds since the start"}
SMOOTHING = (0.0, 0.6, 0.9, 0.97)


class CurveView(msgspec.Struct, frozen=True):
    """How curves are shown; `smoothing` is the weight of past values in the moving average (0: no smoothing)."""

    metric: str = held_out(CRITERION)
    axis: str = "step"
    smoothing: float = 0.0
    log: bool = False


class Trace(msgspec.Struct, frozen=True):
    """A curve to draw: points (x, y) sorted by x.

    For a logarithmic axis, every y is positive, and the renderer takes its logarithm.
    """

    label: str
    sae: int
    points: tuple[tuple[float, float], ...]

    @property
    def newest(self) -> float | None:
        return self.points[-1][1] if self.points else None


def traces(curves: Sequence[Curve], view: CurveView) -> list[Trace]:
    """Return a trace for each curve."""
    return [Trace(curve.label, curve.sae, tuple(_points(curve, view))) for curve in curves]


def ema(values: Sequence[float], smoothing: float) -> list[float]:
    """Return the exponential moving average with bias correction, so that early values are not biased towards 0."""
    mean, weight, averages = 0.0, 0.0, []
    for value in values:
        mean = smoothing * mean + (1 - smoothing) * value
        weight = smoothing * weight + (1 - smoothing)
        averages.append(mean / weight)
    return averages


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return about `most` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * number for number in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten between two positive numbers, plus multiples of them if there are fewer than three."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        candidates = [factor * 10.0**power for power in powers for factor in factors]
        inside = [tick for tick in candidates if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(inside) >= 3:
            break
    return inside or [low, high]


def _points(curve: Curve, view: CurveView) -> Iterator[tuple[float, float]]:
    measured = [(_at(sample, view.axis), sample.value) for sample in curve.samples if sample.value is not None]
    values = ema([value for _, value in measured], view.smoothing)
    for (x, _), value in zip(measured, values, strict=True):
        if value > 0 or not view.log:
            yield x, value


def _at(sample: Sample, axis: str) -> float:
    return {"step": float(sample.step), "tokens": sample.tokens, "time": sample.time_s}[axis]

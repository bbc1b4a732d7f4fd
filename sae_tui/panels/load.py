"""Colours by load: a reading is green, then yellow, then red, at thresholds from the settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sae_tui.alerts.catalog import USUAL_SLOWDOWN_C
from sae_tui.gpu.base import GpuSample
from sae_tui.settings import Settings

# Maps a field to its maximum and to the setting with its thresholds in percent of this maximum.
_OF_MAXIMUM: Mapping[str, tuple[Callable[[GpuSample], float | None], str]] = {
    "utilization": (lambda _: 100, "colour_util_percent"),
    "memory_used_bytes": (lambda sample: sample.memory_total_bytes, "colour_memory_percent"),
    "power_w": (lambda sample: sample.power_limit_w, "colour_power_percent"),
}


def load_style(sample: GpuSample, field: str, settings: Settings) -> str:
    """Return the style for the value of a GPU's field; a value without a known maximum is plain text."""
    value = getattr(sample, field)
    if field == "temperature_c":
        return heat_style(sample, settings)
    top, setting = _OF_MAXIMUM[field]
    return share_style(share_of(value, top(sample)), getattr(settings, setting))


def heat_style(sample: GpuSample, settings: Settings) -> str:
    """Return the style for a GPU's temperature, depending on how close the GPU is to throttling."""
    if sample.temperature_c is None:
        return "text"
    slows_c = (sample.condition and sample.condition.slowdown_c) or USUAL_SLOWDOWN_C
    return _style(sample.temperature_c, sorted(slows_c - each for each in settings.colour_heat_c))


def share_style(share: float | None, percents: Sequence[float]) -> str:
    """Return the style for a share of a maximum; `percents` are the thresholds for yellow and red."""
    # Round, because 100 * (57 / 100) is less than 57.
    return "text" if share is None else _style(round(100 * share, 6), sorted(percents))


def share_of(value: float | None, top: float | None) -> float | None:
    return value / top if value is not None and top else None


def _style(value: float, thresholds: Sequence[float]) -> str:
    yellow_from, red_from = thresholds
    return "high" if value >= red_from else "middle" if value >= yellow_from else "low"

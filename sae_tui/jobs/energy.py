"""A job's energy use, and the resulting cost and CO₂ emissions at the rates in the settings."""

from __future__ import annotations

from typing import NamedTuple

from sae_tui.settings import Settings
from trainer.contract.store.rows import Job
from trainer.contract.wording import number

# If energy was measured for less than this share of a job's time, the measurement counts as incomplete. The limit is
# below 1 because the last readings may not be stored yet when a job ends.
WHOLE = 0.98


class Energy(NamedTuple):
    """A job's energy use; unknown values are None.

    `energy_share` is the share of the job's time during which energy was measured.
    """

    energy_wh: float | None = None
    energy_share: float | None = None
    energy_from: str | None = None
    cost: float | None = None
    currency: str | None = None
    co2_g: float | None = None


def energy_of(job: Job, settings: Settings) -> Energy:
    """Return a job's energy use; all fields are None if nothing was measured."""
    if job.energy_wh is None or not job.energy_known_s or not job.energy_s:
        return Energy()
    priced, kwh = settings.price_per_kwh > 0, job.energy_wh / 1000
    return Energy(
        job.energy_wh,
        min(1.0, job.energy_known_s / job.energy_s),
        _source((job.energy_counted_s or 0.0) / job.energy_known_s),
        kwh * settings.price_per_kwh if priced else None,
        settings.currency if priced else None,
        kwh * settings.co2_g_per_kwh if settings.co2_g_per_kwh > 0 else None,
    )


def is_whole(energy: Energy) -> bool:
    """Return whether energy was measured for almost all of the job's time."""
    return (energy.energy_share or 0.0) >= WHOLE


def energy_words(job: Job, settings: Settings) -> str:
    """Return a string like `at least 1.2 kWh, 0.36 EUR, 480 g CO₂ (measured for 83 % of its time)`, or "" if none."""
    energy = energy_of(job, settings)
    if energy.energy_wh is None or energy.energy_share is None:
        return ""
    parts = [watt_hours(energy.energy_wh)]
    parts += [] if energy.cost is None else [f"{money(energy.cost)} {energy.currency}"]
    parts += [] if energy.co2_g is None else [grams(energy.co2_g)]
    notes = [] if is_whole(energy) else [f"measured for {100 * energy.energy_share:.0f} % of its time"]
    notes += [f"from {energy.energy_from}"] if energy.energy_from == _SAMPLES else []
    return f"{'' if is_whole(energy) else 'at least '}{', '.join(parts)}" + (f" ({'; '.join(notes)})" if notes else "")


def watt_hours(energy_wh: float) -> str:
    """Format an amount of energy, like `12 Wh` or `1.23 kWh`."""
    return f"{number(energy_wh / 1000)} kWh" if energy_wh >= 1000 else f"{number(energy_wh)} Wh"


def money(amount: float) -> str:
    """Format an amount of money with two decimals, or as `<0.01` if it is smaller."""
    return "<0.01" if 0 < amount < 0.01 else f"{amount:.2f}"


def grams(mass_g: float) -> str:
    """Format a mass of CO₂, like `480 g CO₂` or `1.2 kg CO₂`."""
    return f"{number(mass_g / 1000)} kg CO₂" if mass_g >= 1000 else f"{number(mass_g)} g CO₂"


_SAMPLES, _COUNTER = "power samples", "counter"


def _source(counted: float) -> str:
    """Return the source of the measurement; `counted` is the share of the measured time covered by the counter."""
    # The energy of a job's last seconds is always computed from power samples, so the counter never covers the whole
    # measured time.
    if counted > 0.9:
        return _COUNTER
    return _SAMPLES if counted < 0.1 else f"{_COUNTER} and {_SAMPLES}"

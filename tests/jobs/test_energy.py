"""Tests for how a job's energy is shown: price, CO₂, and how much of it was measured."""

from __future__ import annotations

import pytest

from sae_tui.jobs.energy import Energy, energy_of, energy_words
from sae_tui.settings import Settings
from trainer.contract.store.rows import Job

PRICED = Settings(price_per_kwh=0.3, currency="EUR", co2_g_per_kwh=400.0)


def job(**fields: float) -> Job:
    measured = {"energy_wh": 1234.0, "energy_s": 100.0, "energy_known_s": 100.0, "energy_counted_s": 99.0}
    known = {"name": "a", "config": "", "user": "me", "host": "here", "device": "cuda", "gpu_source": "nvml"}
    return Job(**known | measured | fields)


@pytest.mark.parametrize(
    ("fields", "settings", "words"),
    [
        ({}, PRICED, "1.234 kWh, 0.37 EUR, 493.6 g CO₂"),
        ({}, Settings(), "1.234 kWh"),
        ({"energy_wh": 56.0, "energy_counted_s": 0.0}, Settings(), "56 Wh (from power samples)"),
        ({"energy_known_s": 83.0}, Settings(), "at least 1.234 kWh (measured for 83 % of its time)"),
        ({"energy_known_s": 0.0}, PRICED, ""),
    ],
)
def test_energy_is_shown_with_price_co2_and_accuracy(fields, settings, words):
    assert energy_words(job(**fields), settings) == words


def test_scripts_get_numbers_and_null_for_unknown_values():
    energy = energy_of(job(), PRICED)
    assert (energy.energy_wh, energy.cost, energy.co2_g) == pytest.approx((1234.0, 0.3702, 493.6))
    assert (energy.energy_share, energy.energy_from, energy.currency) == (1.0, "counter", "EUR")
    assert energy_of(job(), Settings())[3:] == (None, None, None)
    assert energy_of(job(energy_wh=None), PRICED) == Energy()

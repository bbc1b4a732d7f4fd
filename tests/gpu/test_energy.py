"""Tests for computing a GPU's energy from its power or from the driver's counter, even if readings are missing."""

from __future__ import annotations

import itertools
import random

import pytest

from sae_tui.gpu.energy import LONGEST_GAP_S, EnergyReading, GpuMeter, Used

BEGIN = 1_700_000_000.0


def metered(readings: list[EnergyReading], begin: float, end: float) -> Used:
    meter = GpuMeter(begin)
    for reading in readings:
        meter.add(reading)
    return meter.used(end)


def naive(readings: list[EnergyReading], begin: float, end: float) -> tuple[float, float]:
    """Return joules and measured seconds, computed by a plain loop over pairs of power samples."""
    first, last = readings[0], readings[-1]
    points = [(begin, first.power_w), *((one.timestamp, one.power_w) for one in readings), (end, last.power_w)]
    joules = seconds = 0.0
    for (earlier, before), (later, after) in itertools.pairwise(points):
        if later - earlier <= LONGEST_GAP_S:
            joules += 0.5 * (before + after) * (later - earlier)
            seconds += later - earlier
    return joules, seconds


@pytest.mark.parametrize("seed", range(5))
def test_the_energy_equals_the_sum_from_a_plain_loop_over_power_samples(seed):
    draw = random.Random(seed)
    at, readings = BEGIN, []
    for _ in range(3000):
        at += draw.choice((0.2, 1.0, 1.0, 1.0, 3.0, 9.9, 10.1, 60.0))
        readings.append(EnergyReading(at, draw.uniform(20, 700)))
    end = at + draw.uniform(0, 20)
    joules, seconds = naive(readings, BEGIN, end)
    used = metered(readings, BEGIN, end)
    assert used.joules == pytest.approx(joules, rel=1e-12)
    assert (used.known_s, used.lasted_s) == pytest.approx((seconds, end - BEGIN), rel=1e-12)
    assert used.counted_s == 0


def test_repeated_energy_counter_readings_are_counted_once():
    meter = GpuMeter(BEGIN)
    readings = [EnergyReading(BEGIN + second, None, 100.0 * second) for second in range(0, 91, 30)]
    for _ in range(3):
        for reading in readings:
            if reading.timestamp > meter.newest or meter.newest == BEGIN:
                meter.add(reading)
    assert meter.used(BEGIN + 90).joules == 9000


def test_the_energy_of_a_steady_gpu_is_its_power_times_the_duration():
    used = metered([EnergyReading(BEGIN + second, 250.0) for second in range(1, 3600)], BEGIN, BEGIN + 3600)
    assert used == pytest.approx((250.0 * 3600, 3600, 3600, 0))


def test_a_gap_without_samples_adds_no_energy():
    readings = [EnergyReading(BEGIN + second, 100.0) for second in (0, 1, 2, 62, 63)]
    assert metered(readings, BEGIN, BEGIN + 63) == pytest.approx((300, 63, 3, 0))


def test_the_energy_counter_replaces_power_samples_and_covers_gaps():
    readings = [EnergyReading(BEGIN + second, 100.0, 5000 + 110.0 * second) for second in (0, 3, 63)]
    assert metered(readings, BEGIN, BEGIN + 65) == pytest.approx((110 * 63 + 200, 65, 65, 63))


def test_power_samples_between_two_counter_readings_are_not_counted_twice():
    counters = {0: 0.0, 3: 330.0, 6: 660.0}
    readings = [EnergyReading(BEGIN + second, 100.0, counters.get(second)) for second in range(8)]
    assert metered(readings, BEGIN, BEGIN + 7) == pytest.approx((760, 7, 7, 6))


def test_after_the_counter_restarts_power_samples_are_used_instead():
    readings = [
        EnergyReading(BEGIN + second, 100.0, joules) for second, joules in ((0, 9e6), (1, 9e6 + 100), (2, 50.0))
    ]
    assert metered(readings, BEGIN, BEGIN + 2) == pytest.approx((200, 2, 2, 1))


def test_without_power_samples_or_a_counter_the_energy_is_unknown():
    assert metered([EnergyReading(BEGIN + 1)], BEGIN, BEGIN + 9) == Used(0, 9, 0, 0)


def test_the_energy_counter_alone_is_enough():
    readings = [EnergyReading(BEGIN + second, None, 40.0 * second) for second in (1, 4, 7)]
    assert metered(readings, BEGIN, BEGIN + 8) == pytest.approx((240, 8, 6, 6))


def test_a_reading_no_newer_than_the_last_reading_is_skipped():
    readings = [EnergyReading(BEGIN + second, 100.0) for second in (1, 3, 2, 3, 4)]
    assert metered(readings, BEGIN, BEGIN + 4) == pytest.approx((400, 4, 4, 0))

"""Tests for when an alert starts and ends as a value changes over time."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sae_tui.alerts.hysteresis import GONE, Hysteresis, Rule

RULE = Rule(raise_at=90, clear_at=80, raise_s=10, clear_s=30)
BAD, BETWEEN, GOOD, UNKNOWN = 95, 85, 70, None


def changes(*values: tuple[int, float | None], is_raised: bool = False) -> list[tuple[int, bool]]:
    """Given (time, value) pairs, return the times in seconds at which an alert starts (True) or ends (False)."""
    state = Hysteresis(RULE, is_raised=is_raised)
    return [(now, state.is_raised) for now, value in values if state.changes(value, now)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (((0, BAD), (9, BAD), (10, BAD), (20, BAD)), [(10, True)]),
        (((0, BAD), (9, BETWEEN), (10, BAD), (19, BAD), (20, BAD)), [(20, True)]),
        (((0, BAD), (9, UNKNOWN), (12, BAD), (21, BAD)), []),
        (((0, BAD), (10, BAD), (20, GOOD), (49, GOOD), (50, GOOD)), [(10, True), (50, False)]),
        (((0, BAD), (10, BAD), (20, GOOD), (49, BETWEEN), (50, GOOD), (79, GOOD)), [(10, True)]),
        (((0, BAD), (10, BAD), (20, UNKNOWN), (5000, UNKNOWN)), [(10, True)]),
        (((0, BAD), (10, BAD), (20, GOOD), (49, UNKNOWN), (50, GOOD), (80, GOOD)), [(10, True), (80, False)]),
        (((0, BAD), (10, BAD), (20, GONE), (50, GONE)), [(10, True), (50, False)]),
        (((0, 90), (10, 90)), [(10, True)]),
    ],
)
def test_an_alert_starts_and_ends_only_after_its_delay(values, expected):
    assert changes(*values) == expected


def test_a_stored_alert_stays_active_until_its_value_recovers():
    assert changes((0, BETWEEN), (100, BAD), (101, GOOD), (131, GOOD), is_raised=True) == [(131, False)]


def test_a_rule_without_delays_raises_and_clears_its_alert_immediately():
    state = Hysteresis(Rule(1, 1, 0, 0))
    assert [state.changes(value, 0.0) for value in (0, 1, 1, 0)] == [False, True, False, True]


@pytest.mark.parametrize(("away_s", "calm_s"), [(31, 300), (140, 300), (300, 600), (1700, 3400)])
def test_a_flapping_alert_stays_active_and_ends_minutes_after_its_value_recovers(away_s, calm_s):
    state = Hysteresis(RULE)
    values = [(now, BAD if now % (away_s + 20) < 20 else GOOD) for now in range(24 * 3600)]
    changed_at = [now for now, value in values if state.changes(value, now)]
    assert len(changed_at) == 5
    assert state.flaps
    begun = values[-1][0]
    quiet = [now for now in range(begun, begun + 2 * 3600) if state.changes(GOOD, now)]
    assert len(quiet) == 1
    assert calm_s - away_s <= quiet[0] - begun <= calm_s + 2


def test_an_alert_that_returns_irregularly_is_reported_only_a_few_times_an_hour():
    state, chance, now, changed_at = Hysteresis(RULE), random.Random(7), 0, []
    while now < 8 * 3600:
        for value, lasts_s in ((BAD, 20), (GOOD, int(chance.expovariate(1 / 300)))):
            changed_at += [now + second for second in range(lasts_s) if state.changes(value, now + second)]
            now += lasts_s
    hours = Counter(at // 3600 for at in changed_at)
    assert max(hours.values()) <= 8
    assert len(changed_at) <= 16


def test_an_alert_that_returns_after_more_than_half_an_hour_is_not_flapping():
    state = Hysteresis(RULE)
    changed_at = [now for now in range(24 * 3600) if state.changes(BAD if now % 2400 < 60 else GOOD, now)]
    assert len(changed_at) == 2 * 36

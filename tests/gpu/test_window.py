"""Tests for resampling a GPU's history to the number of columns on the screen."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sae_tui.format import sparkline
from sae_tui.gpu.aggregate import shares
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.history import ROLL_UP
from sae_tui.gpu.past import past
from sae_tui.gpu.period import Period
from sae_tui.gpu.ring import Ring, RingReading
from sae_tui.gpu.window import FIELDS, SPANS_S, live_window, stored_past, stored_window
from trainer.contract.paths import DataDir
from trainer.contract.store.database import open_writer

HOST, NOW = "box", 1_700_000_040.0
DAY = 86_400


@pytest.fixture
def db(tmp_path: Path) -> Path:
    data = DataDir(tmp_path)
    data.create()
    return data.gpu_db


def store(path: Path, stamps: list[float], *, minutes: bool = False, job: int | None = None, busy: float = 50) -> None:
    """Store a GPU's samples and per-minute means, or only per-minute means if `minutes` is set."""
    values = (busy, 1 << 30, 2 << 30, 60, 100.0, job)
    with closing(open_writer(path, "gpu")) as db:
        for stamp in stamps:
            if minutes:
                row = (HOST, 0, int(stamp // 60), "GPU-a", 60, busy, busy, *values[1:])
                db.execute("INSERT INTO gpu_minutes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            else:
                db.execute(
                    "INSERT INTO gpu_metrics VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
                    (HOST, 0, stamp, "GPU-a", *values),
                )
        if not minutes:
            db.execute(ROLL_UP, (HOST, 0, 0.0, "GPU-a"))


@pytest.mark.parametrize("span_s", SPANS_S)
@pytest.mark.parametrize("n", [1, 67, 300])
def test_a_window_has_at_most_the_requested_columns_and_ends_now(db: Path, span_s: int, n: int) -> None:
    store(db, [NOW])
    window = stored_window(db, HOST, "GPU-a", span_s, n, NOW)
    assert len(window.jobs) <= max(n, 1)
    assert window.begin <= NOW - span_s + window.step_s
    assert NOW < window.end <= NOW + window.step_s
    assert {len(values) for values in window.columns.values()} == {len(window.jobs)}
    assert window.columns["utilization"][-1] == 50


def test_each_column_is_the_mean_of_its_interval_and_gaps_stay_gaps(db: Path) -> None:
    store(db, [NOW - 20, NOW - 19, NOW - 18, NOW - 17], busy=20, job=3)
    store(db, [NOW - 16], busy=60, job=4)
    window = stored_window(db, HOST, "GPU-a", 300, 60, NOW)
    assert window.step_s == 5
    known = [
        (window.time_of(place), value, window.jobs[place])
        for place, value in enumerate(window.columns["utilization"])
        if value is not None
    ]
    assert known == [(NOW - 20, 28.0, 4)]
    assert window.columns["power_w"].count(100.0) == 1


def test_a_week_is_read_from_the_per_minute_means(db: Path) -> None:
    store(db, [NOW - day * DAY for day in (1, 2, 6)], minutes=True, job=9)
    window = stored_window(db, HOST, "GPU-a", 7 * DAY, 70, NOW)
    assert window.step_s % 60 == 0
    assert window.jobs.count(9) == 3
    for name in FIELDS:
        assert sum(value is not None for value in window.columns[name]) == 3


def test_another_gpu_or_a_missing_store_has_no_history(db: Path, tmp_path: Path) -> None:
    store(db, [NOW - 3])
    for path, uuid in ((db, "GPU-b"), (tmp_path / "none.db", "GPU-a")):
        window = stored_window(path, HOST, uuid, 300, 60, NOW)
        assert set(window.columns["utilization"]) == {None}
        assert len(window.jobs) == 60
    assert not (tmp_path / "none.db").exists()


def test_the_newest_intervals_come_from_the_ring_buffer_and_show_the_current_job() -> None:
    ring = Ring()
    ring.extend_history([RingReading(float(second), utilization=second) for second in range(100, 110)], "GPU-a")
    recent = past({0: ring}, 5, interval_s=1.0, now=109.5)
    window = live_window(recent, 0, 5, 1.0, 7)
    assert window.columns["utilization"] == [105, 106, 107, 108, 109]
    assert window.jobs == [None, None, None, None, 7]
    assert window.end - window.begin == 5.0


def test_a_stored_period_has_the_mean_of_each_step_and_blanks_for_unknown_gpus(db: Path) -> None:
    store(db, [NOW - 20, NOW - 18], busy=20)
    store(db, [NOW - 16], busy=80)
    known = GpuSample(3, "GPU-a", "H100", NOW, power_limit_w=700.0)
    period = stored_past(db, HOST, [known, GpuSample(5, "GPU-b", "H100", NOW)], 300, 60, NOW)
    busy = period.column(3, "utilization", 2)
    assert [value for value in busy if value is not None] == [40.0]
    assert len(busy) == 60
    assert set(period.column(5, "utilization", 2)) == {None}
    assert period.power_limits_w == {3: 700.0, 5: None}
    assert [value for value in shares(period).utilization if value is not None] == [0.4]


@given(st.lists(st.none() | st.floats(0, 100), max_size=50), st.integers(1, 60))
def test_a_period_drawn_in_fewer_columns_loses_no_value(values: list[float | None], n: int) -> None:
    drawn = Period(values).in_columns(n)
    assert len(drawn) == min(n, len(values))
    if len(values) <= n:
        assert list(drawn) == values
    parts = [values[column * len(values) // len(drawn) : (column + 1) * len(values) // len(drawn)]
             for column in range(len(drawn))]  # fmt: skip
    assert [value for part in parts for value in part] == values
    for value, part in zip(drawn, parts, strict=True):
        known = [each for each in part if each is not None]
        assert value == (pytest.approx(sum(known) / len(known)) if known else None)


def test_a_period_is_scaled_to_the_width_but_other_histories_show_only_their_end() -> None:
    values = [0.0] * 30 + [100.0] * 10
    assert sparkline(values, 10, 100) == "█" * 10
    assert sparkline(Period(values), 4, 100) == "▁▁▁█"

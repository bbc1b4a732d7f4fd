"""The past of a card in as many columns as are drawn."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from sae_tui.gpu.history import ROLL_UP
from sae_tui.gpu.past import past
from sae_tui.gpu.ring import Reading, Ring
from sae_tui.gpu.window import FIELDS, SPANS_S, live_window, stored_window
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
    """Store samples of a card with the means of their minutes, or with `minutes` such means alone."""
    values = (busy, 1 << 30, 2 << 30, 60, 100.0, job)
    with closing(open_writer(path, "gpu")) as db:
        for stamp in stamps:
            if minutes:
                row = (HOST, 0, int(stamp // 60), "GPU-a", 60, busy, busy, *values[1:])
                db.execute("INSERT INTO gpu_minutes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            else:
                db.execute(
                    "INSERT INTO gpu_metrics VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (HOST, 0, stamp, "GPU-a", *values)
                )
        if not minutes:
            db.execute(ROLL_UP, (HOST, 0, 0.0, "GPU-a"))


@pytest.mark.parametrize("span_s", SPANS_S)
@pytest.mark.parametrize("n", [1, 7, 60, 67, 300])
def test_a_span_has_no_more_columns_than_there_are_and_ends_now(db: Path, span_s: int, n: int) -> None:
    store(db, [NOW])
    window = stored_window(db, HOST, "GPU-a", span_s, n, NOW)
    assert len(window.jobs) <= max(n, 1)
    assert window.begin <= NOW - span_s + window.step_s
    assert NOW < window.end <= NOW + window.step_s
    assert {len(values) for values in window.columns.values()} == {len(window.jobs)}
    assert window.columns["utilization"][-1] == 50


def test_each_column_is_the_mean_of_its_time_and_a_gap_is_a_gap(db: Path) -> None:
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


def test_a_week_is_read_from_the_means_of_minutes(db: Path) -> None:
    store(db, [NOW - day * DAY for day in (1, 2, 6)], minutes=True, job=9)
    window = stored_window(db, HOST, "GPU-a", 7 * DAY, 70, NOW)
    assert window.step_s % 60 == 0
    assert window.jobs.count(9) == 3
    for name in FIELDS:
        assert sum(value is not None for value in window.columns[name]) == 3


def test_another_card_or_no_store_has_no_past(db: Path, tmp_path: Path) -> None:
    store(db, [NOW - 3])
    for path, uuid in ((db, "GPU-b"), (tmp_path / "none.db", "GPU-a")):
        window = stored_window(path, HOST, uuid, 300, 60, NOW)
        assert set(window.columns["utilization"]) == {None}
        assert len(window.jobs) == 60
    assert not (tmp_path / "none.db").exists()


def test_the_newest_intervals_are_those_of_the_ring_and_the_job_is_of_now() -> None:
    ring = Ring()
    ring.extend_history([Reading(float(second), utilization=second) for second in range(100, 110)])
    recent = past({0: ring}, 5, interval_s=1.0, now=109.5)
    window = live_window(recent, 0, 5, 1.0, 7)
    assert window.columns["utilization"] == [105, 106, 107, 108, 109]
    assert window.jobs == [None, None, None, None, 7]
    assert window.end - window.begin == 5.0

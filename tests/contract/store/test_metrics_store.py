"""Tests for a run's metrics, which one process writes and others read."""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.contract.store.database import StoreError
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, Point, SeriesReader, SeriesWriter, best_sae
from trainer.contract.store.rows import Event


class Store:
    """A writer and a reader of the same metrics file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = SeriesWriter(path)
        self.reader = SeriesReader(path)
        self.names = iter(range(10**9))

    def close(self) -> None:
        self.reader.close()
        self.writer.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Open one store for all examples in a test. Each example uses a new metric name."""
    with contextlib.closing(Store(tmp_path_factory.mktemp("series") / "metrics.db")) as opened:
        yield opened


@pytest.fixture
def run(tmp_path: Path, copy_store: Callable[..., Path]) -> Iterator[Store]:
    with contextlib.closing(Store(copy_store("metrics", tmp_path / "metrics.db"))) as opened:
        yield opened


def rows(name: str, values: dict[int, float], rank: int = 0) -> list[MetricRow]:
    return [MetricRow(name, step, value, rank) for step, value in values.items()]


def test_points_are_read_as_written_and_later_reads_return_only_new_points(run: Store) -> None:
    run.writer.write(rows("loss", {0: 3.0, 10: 2.0}))
    assert run.reader.points("loss") == [Point(0, 3.0), Point(10, 2.0)]
    run.writer.write(rows("loss", {20: 1.0}))
    assert run.reader.points("loss", after=10) == [Point(20, 1.0)]
    assert run.reader.points("loss", after=20) == []


def test_series_for_different_ranks_and_names_are_kept_apart(run: Store) -> None:
    run.writer.write([MetricRow("loss", 1, 1.0), MetricRow("loss", 1, 2.0, rank=1), MetricRow("fvu", 1, 3.0)])
    assert run.reader.series() == [("fvu", 0), ("loss", 0), ("loss", 1)]
    assert run.reader.points("loss", 1) == [Point(1, 2.0)]
    assert run.reader.history("fvu") == [Point(1, 3.0)]
    assert run.reader.latest() == {"loss": 1.0, "fvu": 3.0}
    assert run.reader.latest(1) == {"loss": 2.0}


def test_a_missing_series_is_empty(run: Store) -> None:
    assert run.reader.points("loss") == []
    assert run.reader.history("loss") == []
    assert run.reader.series() == []
    assert run.reader.latest() == {}
    assert run.reader.heartbeat() is None


def test_non_finite_values_are_null_in_points_and_omitted_elsewhere(run: Store) -> None:
    run.writer.write(rows("loss", {0: math.nan, 1: 2.0, 2: math.inf, 3: -math.inf}))
    assert run.reader.points("loss") == [Point(0, None), Point(1, 2.0), Point(2, None), Point(3, None)]
    assert run.reader.history("loss") == [Point(1, 2.0)]
    assert run.reader.latest() == {}
    run.writer.write(rows("loss", {step: math.nan for step in range(4, 1000)}))
    assert run.reader.history("loss") == [Point(1, 2.0)]


flushes = st.lists(
    st.dictionaries(
        st.one_of(st.integers(0, 300), st.integers(0, 600_000)),
        st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf])),
        max_size=40,
    ),
    max_size=6,
)


def naive_history(values: dict[int, float], most: int) -> list[Point]:
    """Return the expected result of `history`, computed directly from all values."""
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    if len(finite) <= most:
        return [Point(step, finite[step]) for step in sorted(finite)]
    first, last = min(values), max(values)
    width = 1
    while (last - first) // width >= most:
        width *= 2
    points = []
    for bucket in sorted({step // width for step in finite}):
        inside = [value for step, value in finite.items() if step // width == bucket]
        middle = min(max(bucket * width + width // 2, first), last)
        points.append(Point(middle, statistics.fmean(inside), min(inside), max(inside)))
    return points


@given(flushes=flushes, most=st.integers(1, 60))
@settings(max_examples=150)
def test_the_history_matches_a_naive_computation(shared: Store, flushes: list[dict[int, float]], most: int) -> None:
    name = f"metric{next(shared.names)}"
    written: dict[int, float] = {}
    for flush in flushes:
        shared.writer.write(rows(name, flush))
        written |= flush
    points, expected = shared.reader.history(name, most=most), naive_history(written, most)
    assert len(points) <= most + 1
    assert [(point.step, point.low, point.high) for point in points] == [
        (point.step, point.low, point.high) for point in expected
    ]
    assert [point.value for point in points] == pytest.approx([point.value for point in expected], rel=1e-9, abs=1e-6)
    finite = {step: value for step, value in written.items() if math.isfinite(value)}
    assert [(point.step, point.value) for point in shared.reader.points(name) if point.value is not None] == sorted(
        finite.items()
    )


@pytest.mark.parametrize("most", [1, 5, 100])
def test_a_step_written_twice_counts_once_with_its_newer_value(run: Store, most: int) -> None:
    run.writer.write(rows("loss", {step: 100.0 for step in range(10_000)}))
    run.writer.write(rows("loss", {step: 1.0 for step in range(5_000, 10_000)}))
    run.writer.write(rows("loss", {step: 1.0 for step in range(5_000)}))
    history = run.reader.history("loss", most=most)
    assert {(point.value, point.low, point.high) for point in history} == {(1.0, 1.0, 1.0)}


def test_a_long_history_has_the_requested_number_of_points(shared: Store) -> None:
    shared.writer.write(rows("long", {step: float(step) for step in range(200_000)}))
    for most in (50, 500, 5_000):
        history = shared.reader.history("long", most=most)
        assert most / 2 <= len(history) <= most + 1
        assert (history[0].low, history[-1].high) == (0.0, 199_999.0)
        steps = [point.step for point in history]
        assert steps == sorted(set(steps))
        assert steps[-1] <= 199_999


@pytest.mark.parametrize(
    "lost",
    ["level >= 1", "level = 2", "level = 1", "bucket >= 3", "level = 1 AND bucket % 5 = 0", "level = 2 AND bucket < 4"],
)
def test_reads_are_correct_without_roll_ups_and_lost_roll_ups_are_rebuilt(run: Store, lost: str) -> None:
    run.writer.write(rows("loss", {3 * step: math.sin(step) if step % 7 else math.nan for step in range(9_000)}))
    run.writer.write(rows("few", {8: 1.0, 30_000: 2.0}, rank=1))
    asked = [("loss", 0, most) for most in (1, 20, 500, 10_000)] + [("few", 1, 500)]
    before = [run.reader.history(name, rank, most=most) for name, rank, most in asked]
    assert run.reader.is_rolled_up()
    with contextlib.closing(sqlite3.connect(run.path)) as other, other:
        other.execute(f"DELETE FROM rollups WHERE {lost}")
    assert not run.reader.is_rolled_up()
    for (name, rank, most), points in zip(asked, before, strict=True):
        for point, expected in zip(run.reader.history(name, rank, most=most), points, strict=True):
            assert (point.step, point.low, point.high) == (expected.step, expected.low, expected.high)
            assert point.value == pytest.approx(expected.value, rel=1e-9, abs=1e-12)
    run.writer.roll_up_missing()
    assert run.reader.is_rolled_up()
    assert [run.reader.history(name, rank, most=most) for name, rank, most in asked] == before


def test_rows_without_roll_ups_are_still_read_in_buckets(run: Store) -> None:
    run.writer.write(rows("loss", {1: 1.0}))
    with contextlib.closing(sqlite3.connect(run.path)) as other, other:
        other.execute("DELETE FROM rollups WHERE bucket > 0")
        other.executemany("INSERT INTO metrics VALUES(1, 0, ?, 0, 1.0)", [(step,) for step in range(2, 20_000)])
    assert len(run.reader.history("loss", most=100)) <= 101


def test_a_curve_with_one_more_value_than_the_limit_is_not_empty(run: Store) -> None:
    run.writer.write(rows("loss", {10 * step: 1.0 for step in range(501)}))
    assert 250 <= len(run.reader.history("loss", most=500)) <= 500


def test_earlier_points_on_a_growing_curve_do_not_change(run: Store) -> None:
    run.writer.write(rows("loss", {step: float(step) for step in range(10_000)}))
    before = run.reader.history("loss", most=50)
    run.writer.write(rows("loss", {step: float(step) for step in range(10_000, 10_500)}))
    after = run.reader.history("loss", most=50)
    assert after[: len(before) - 1] == before[:-1]


def test_a_missing_step_has_the_timestamp_of_the_next_step(run: Store) -> None:
    before = time.time()
    run.writer.write(rows("loss", {10: 3.0}))
    middle = time.time()
    run.writer.write(rows("loss", {20: math.nan}))
    first, same, second, none = run.reader.timestamps("loss", [0, 10, 11, 21])
    assert before <= first == same <= middle <= second <= time.time()
    assert none is None
    assert run.reader.timestamps("nothing", [0]) == [None]
    assert list(run.reader.timed_values("loss")) == [(10, first, 3.0), (20, second, None)]


def test_heartbeat_and_events_are_written_in_the_same_flush_as_the_metrics(run: Store) -> None:
    heartbeats = [Heartbeat("training", step, 100, 64 * step, 1.5, dropped=2) for step in (1, 2)]
    events = [Event(timestamp=float(number), level="warning", kind="nan", message=f"m{number}") for number in range(3)]
    run.writer.write([], heartbeats[0], events[:2])
    run.writer.write([], heartbeats[1], iter(events[2:]))
    assert run.reader.heartbeat() == heartbeats[1]
    assert run.reader.events() == events


def test_each_flush_changes_the_version_number_that_a_reader_sees(run: Store) -> None:
    before = run.reader.version()
    assert run.reader.version() == before
    run.writer.write(rows("loss", {0: 1.0}))
    assert run.reader.version() != before


def test_a_restarted_writer_continues_the_same_series(run: Store) -> None:
    run.writer.write(rows("loss", {0: 1.0}))
    run.writer.close()
    run.writer = SeriesWriter(run.path)
    run.writer.write(rows("fvu", {0: 2.0}) + rows("loss", {1: 3.0}))
    assert run.reader.points("loss") == [Point(0, 1.0), Point(1, 3.0)]
    assert run.reader.points("fvu") == [Point(0, 2.0)]


def test_a_failed_flush_leaves_no_rows_and_does_not_mix_up_series_names(run: Store) -> None:
    size = sum(file.stat().st_size for file in run.path.parent.iterdir())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(StoreError, match="is full or failing"):
            run.writer.write(rows("lost", {step: 1.0 for step in range(50_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    run.writer.write(rows("loss", {0: 1.0}))
    run.writer.write(rows("lost", {0: 2.0}))
    assert run.reader.latest() == {"loss": 1.0, "lost": 2.0}


WRITES_UNTIL_CLOSED = """
import sys, threading
from pathlib import Path
from trainer.contract.store.metrics_store import Heartbeat, MetricRow, SeriesWriter
writer, closed, step = SeriesWriter(Path(sys.argv[1])), threading.Event(), 0
threading.Thread(target=lambda: (sys.stdin.read(), closed.set())).start()
print("ready", flush=True)
while not closed.is_set():
    both = [MetricRow(name, step + n, float(step + n)) for n in range(10) for name in ("loss", "fvu")]
    writer.write(both, Heartbeat("training", step + 9, 10**9, 0, 0.0))
    step += 10
"""


def test_a_reader_follows_a_writing_process_without_gaps(
    tmp_path: Path, child: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    path = tmp_path / "metrics.db"
    writer = child(WRITES_UNTIL_CLOSED, path)
    assert writer.hear() == "ready"
    reader = SeriesReader(path)
    values_read: list[float | None] = []

    def read_on() -> bool:
        heartbeat = reader.heartbeat()
        new = reader.points("loss", after=len(values_read) - 1)
        values_read.extend(point.value for point in new)
        assert len(values_read) % 10 == 0  # each flush becomes visible atomically
        assert heartbeat is None or heartbeat.step < len(values_read)
        assert len(reader.points("fvu")) >= len(values_read)
        return len(values_read) > 3000

    eventually(read_on)
    assert writer.finish() == 0
    assert read_on()
    assert values_read == [float(step) for step in range(len(values_read))]
    assert sum(point.value or 0.0 for point in reader.history("fvu", most=10)) > 0
    reader.close()


def test_rows_flushed_by_a_killed_writer_are_readable(tmp_path: Path) -> None:
    code = """
import os, signal, sys
from pathlib import Path
from trainer.contract.store.metrics_store import MetricRow, SeriesWriter
writer = SeriesWriter(Path(sys.argv[1]))
writer.write([MetricRow("loss", 0, 1.0)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = tmp_path / "metrics.db"
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == -signal.SIGKILL
    with contextlib.closing(SeriesReader(path)) as reader:
        assert reader.points("loss") == [Point(0, 1.0)]
    with contextlib.closing(SeriesWriter(path)) as writer:
        writer.write(rows("loss", {1: 2.0}))


def test_rewinding_removes_later_rows_and_corrects_all_roll_ups(tmp_path: Path) -> None:
    rows = [MetricRow("fvu", step, float(step)) for step in range(0, 9000, 10)]
    rows += [MetricRow("step_ms", step, 2.0 * step, 1) for step in range(0, 9000, 10)]
    rows += [
        MetricRow("rare", 4200, 1.0),
        MetricRow("rare", 8000, 2.0),
        MetricRow("late", 8990, 1.0),
        MetricRow("nan", 5000, float("nan")),
    ]
    rows_left = [row for row in rows if row.step <= 5000]
    for name, written in (("rewound", rows), ("expected", rows_left)):
        with contextlib.closing(SeriesWriter(tmp_path / f"{name}.db")) as writer:
            writer.write(written, Heartbeat("training", 8999, 10_000, 9, 1.0))
    with contextlib.closing(SeriesWriter(tmp_path / "rewound.db")) as writer:
        writer.rewind(Heartbeat("resuming", 5000, 10_000, 640_000, 2.0))
    with (
        contextlib.closing(SeriesReader(tmp_path / "rewound.db")) as reader,
        contextlib.closing(SeriesReader(tmp_path / "expected.db")) as expected,
    ):
        assert reader.latest() == expected.latest()
        for name, rank in expected.series():
            assert reader.points(name, rank) == expected.points(name, rank)
            for most in (3, 20, 200):
                assert reader.history(name, rank, most=most) == expected.history(name, rank, most=most)
        heartbeat = reader.heartbeat()
    assert (heartbeat.phase, heartbeat.step, heartbeat.tokens) == ("resuming", 5000, 640_000)


def test_the_best_sae_in_a_sweep_is_chosen_by_held_out_data() -> None:
    batches = {"fvu": 0.3, "fvu@a": 0.3, "fvu@b": 0.1}
    assert best_sae(batches) == "b"
    assert best_sae(batches | {"heldout_fvu@a": 0.31, "heldout_fvu@b": 0.4}) == "a"
    assert best_sae({"fvu": 0.3, "heldout_fvu": 0.4}) == best_sae({}) == ""

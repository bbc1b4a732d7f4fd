"""Tests for the ring buffer of one GPU's readings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.ring import Ring, RingReading


def sample(timestamp: float, utilization: int | None = 50) -> GpuSample:
    return GpuSample(0, "GPU-a", "A", timestamp, utilization=utilization, memory_used_bytes=int(timestamp) * 10)


def test_a_column_ends_with_the_newest_value_and_may_be_shorter_than_requested() -> None:
    ring = Ring()
    assert ring.column("utilization", 5) == []
    assert ring.latest() is None
    for timestamp in range(3):
        ring.append(sample(timestamp))
    assert ring.column("timestamp", 2) == [1, 2]
    assert ring.column("memory_used_bytes", 100) == [0, 10, 20]
    assert ring.latest() == sample(2)


def test_an_unsupported_sensor_stays_none() -> None:
    ring = Ring()
    ring.append(sample(1, None))
    ring.append(sample(2, 0))
    assert ring.column("utilization", 9) == [None, 0]
    assert ring.column("power_w", 9) == [None, None]


def test_the_oldest_sample_is_overwritten() -> None:
    ring = Ring(capacity=3)
    for timestamp in range(10):
        ring.append(sample(timestamp))
    assert ring.column("timestamp", 10) == [7, 8, 9]
    assert len(ring) == 3


def test_stored_history_is_placed_before_live_samples() -> None:
    ring = Ring(capacity=5)
    ring.append(sample(100))
    ring.extend_history([RingReading(timestamp, 7) for timestamp in (96, 97, 98, 99, 100, 101)], "GPU-a")
    assert ring.column("timestamp", 9) == [96, 97, 98, 99, 100]
    assert ring.column("utilization", 9) == [7, 7, 7, 7, 50]
    assert ring.latest() == sample(100)


def test_reloaded_history_replaces_the_earlier_history() -> None:
    ring = Ring(capacity=5)
    ring.append(sample(100))
    ring.extend_history([RingReading(97, 7)], "GPU-a")
    ring.append(sample(101))
    ring.extend_history([RingReading(97, 7), RingReading(99, 8)], "GPU-a")
    assert ring.column("timestamp", 9) == [97, 99, 100, 101]


def test_only_the_end_of_a_history_longer_than_the_ring_is_kept() -> None:
    ring = Ring(capacity=3)
    ring.extend_history((RingReading(timestamp, 50) for timestamp in range(9)), "GPU-a")
    assert ring.column("timestamp", 9) == [6, 7, 8]


def test_readings_since_a_position_are_complete_after_any_change_to_the_clock() -> None:
    ring = Ring(capacity=4)
    ring.extend_history([RingReading(1.0, 50)], "GPU-a")
    for timestamp in (7, 8, 2):
        ring.append(sample(timestamp))
    rows, position = ring.since(None, "GPU-a")
    assert [row.timestamp for row in rows] == [1, 7, 8, 2]
    ring.append(sample(3))
    assert ring.since(position, "GPU-a")[0] == [RingReading(3, 50, 30, None, None)]
    assert ring.since(position + 1, "GPU-a")[0] == []
    assert len(ring.since(position - 100, "GPU-a")[0]) == 4


def test_stored_history_from_another_gpu_is_not_placed_before_live_samples() -> None:
    ring = Ring()
    ring.append(sample(5))
    ring.extend_history([RingReading(1.0, 50)], "GPU-b")
    assert ring.column("timestamp") == [5]
    ring.extend_history([RingReading(1.0, 50)], "GPU-a")
    assert ring.column("timestamp") == [1, 5]


def test_another_gpu_at_the_same_index_starts_without_the_old_readings() -> None:
    ring = Ring()
    ring.append(sample(1))
    other = replace(sample(2), uuid="GPU-b")
    lost = replace(sample(3), uuid="GPU-index-0", healthy=False, failed={"uuid": "unknown"})
    for each in (lost, other):
        ring.append(each)
    assert ring.column("timestamp") == [2]
    assert ring.since(None, "GPU-a")[0] == []
    assert ring.since(None, "GPU-b")[0] == [RingReading(2, 50, 20, None, None)]


def test_a_reader_never_sees_a_half_written_row(until: Callable[..., Any]) -> None:
    ring = Ring(capacity=50)
    done = threading.Event()

    def write() -> None:
        for timestamp in range(20_000):
            ring.append(sample(timestamp))
        done.set()

    threading.Thread(target=write, daemon=True).start()
    reads = 0
    while not done.is_set() or not reads:
        rows, _ = ring.since(None, "GPU-a")
        reads += 1
        assert all(row.memory_used_bytes == row.timestamp * 10 for row in rows)
        assert [row.timestamp for row in rows] == sorted(row.timestamp for row in rows)

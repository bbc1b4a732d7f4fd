"""Tests that readings from all GPUs are aligned to a common time grid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sae_tui.gpu.aggregate import CapacityShares, shares
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.past import RecentHistory, merge, past
from sae_tui.gpu.ring import Ring, RingReading

TOTAL = 100
LIMIT_W = 400.0
LOST = None


def sample(index: int, timestamp: float, utilization: int | None) -> GpuSample:
    """Return a sample whose memory and power are proportional to its utilisation; None stands for a lost GPU."""
    if utilization is LOST:
        return GpuSample(index, f"GPU-{index}", "A", timestamp, healthy=False, reason="lost")
    return GpuSample(
        index, f"GPU-{index}", "A", timestamp, utilization=utilization, memory_used_bytes=utilization,
        memory_total_bytes=TOTAL, temperature_c=utilization, power_w=4.0 * utilization, power_limit_w=LIMIT_W,
    )  # fmt: skip


def of(*gpus: Mapping[float, int | None], now: float, n: int = 8) -> RecentHistory:
    """Return the GPUs' history, given each GPU's utilisation by time."""
    rings = []
    for index, gpu in enumerate(gpus):
        rings.append(Ring())
        for timestamp, utilization in gpu.items():
            rings[-1].append(sample(index, timestamp, utilization))
    return past(dict(enumerate(rings)), n, interval_s=1.0, now=now)


def every_second(first: float, last: float, utilization: int | None = 50) -> dict[float, int | None]:
    return {first + second: utilization for second in range(round(last - first) + 1)}


def drawn(found: RecentHistory, index: int, n: int = 8) -> str:
    """Draw one character per interval: `.` for a gap, otherwise the utilisation in tens of percent."""
    return "".join("." if value is None else str(round(value / 10)) for value in found.column(index, "utilization", n))


def line(values: Iterable[float | None]) -> str:
    return "".join("." if value is None else str(round(10 * value)) for value in values)


def test_the_plot_of_a_slow_gpu_has_full_width_and_holds_values_between_samples() -> None:
    grid = of(every_second(100.1, 110.1), {100.9: 10, 103.2: 30, 105.8: 50, 108.1: 70, 110.4: 90}, now=110.6)
    assert drawn(grid, 0) == "55555555"
    assert drawn(grid, 1) == "33555779"


def test_a_late_gpu_repeats_its_last_value_and_a_silent_gpu_has_a_gap() -> None:
    others = every_second(100.1, 110.1)
    assert drawn(of(others, every_second(100.1, 106.1), now=110.6), 1) == "55555555"
    silent = every_second(100.1, 103.1) | every_second(108.9, 110.9, LOST)
    assert drawn(of(others, silent, now=110.95), 1) == "55555..."
    long_ago = every_second(80.1, 103.1)
    assert drawn(of(others, long_ago, now=120.6, n=20), 1, 20) == "5555................"


def test_the_newest_column_is_the_current_interval_or_the_one_before() -> None:
    gpu = every_second(100.1, 110.1)
    assert of(gpu, now=110.9).column(0, "timestamp", 2) == [109.1, 110.1]
    assert of(gpu, now=111.05).column(0, "timestamp", 2) == [109.1, 110.1]
    assert of(gpu, now=112.05).column(0, "timestamp", 2) == [
        110.1,
        110.1,
    ]  # the GPU's reading is late, so its last value is repeated


def test_samples_in_one_interval_share_a_column_even_after_the_clock_was_set_back() -> None:
    assert drawn(of({107.1: 10, 108.0: 20, 108.1: 30, 109.1: 40, 110.1: 50}, now=110.5, n=4), 0) == "1345"
    set_back = {500.1: 90, 501.1: 90, **every_second(107.1, 110.1)}
    assert drawn(of(set_back, now=110.5, n=4), 0) == "5555"


def test_a_gpu_that_answers_a_second_later_causes_no_dip_at_the_start() -> None:
    before = every_second(10.1, 50.1, 80)
    early, late = before | every_second(100.8, 105.1, 80), before | every_second(101.1, 105.1, 10)
    together = shares(of(*[early] * 8, *[late] * 8, now=105.4))
    assert line(together.memory) == "...44444"
    # At the start, half of the GPUs have not yet responded at all.
    started = shares(of(*[before | {100.8: 80}] * 8, *[before] * 8, now=100.9, n=60))
    assert line(started.memory) == "8" * 10 + "." * 50


def test_a_gpu_whose_last_samples_were_not_stored_causes_no_dip_before_a_gap() -> None:
    after = every_second(140.1, 145.1, 80)
    stored, killed = every_second(100.1, 120.1, 80) | after, every_second(100.1, 117.1, 80) | after
    together = shares(of(stored, killed, now=145.4, n=30))
    assert line(together.memory) == "88" + "." * 22 + "888888"


def test_a_late_gpu_contributes_its_last_value_to_the_sum() -> None:
    together = shares(of(every_second(100.1, 110.1, 80), every_second(100.1, 108.1, 20), now=110.3))
    assert line(together.utilization) == "55555555"
    assert line(together.power) == "55555555"


def test_values_before_a_gpu_was_lost_are_relative_to_the_total_at_that_time() -> None:
    lost = every_second(100.1, 106.1, 70) | every_second(107.1, 110.1, LOST)
    together = shares(of(*[every_second(100.1, 110.1, 70)] * 3, lost, now=110.5))
    for quantity in (together.memory, together.utilization, together.power, together.temperature):
        assert line(quantity) == "77777777"


def test_a_gpu_without_a_power_limit_is_neither_in_the_sum_nor_in_the_total() -> None:
    rings = [Ring(), Ring()]
    for timestamp in (109.1, 110.1):
        rings[0].append(sample(0, timestamp, 50))
        rings[1].append(GpuSample(1, "GPU-1", "B", timestamp, power_w=900.0))
    assert line(shares(past(dict(enumerate(rings)), 2, interval_s=1.0, now=110.5)).power) == "55"


def test_stored_history_is_drawn_before_any_gpu_has_answered() -> None:
    rings = [Ring(), Ring()]
    for ring in rings:
        ring.extend_history((RingReading(90.1 + second, 30, 30, 30, 100.0, TOTAL) for second in range(11)), "GPU-a")
    assert line(shares(past(dict(enumerate(rings)), 20, interval_s=1.0, now=110.5)).memory) == "3" * 11 + "." * 9


def test_without_gpus_or_columns_the_history_is_empty() -> None:
    assert shares(past({}, 8, interval_s=1.0, now=1.0)) == CapacityShares((), (), (), ())
    assert of(every_second(1.1, 3.1), now=3.5, n=0).column(0, "utilization", 0) == []


def test_driver_buffer_readings_fill_only_intervals_without_stored_readings() -> None:
    stored = [RingReading(10.0, 40), RingReading(11.0, 41), RingReading(14.0, 44)]
    remembered = [RingReading(float(second), 7) for second in range(9, 20)]
    found = merge(stored, remembered, 1.0, now=15.5)
    assert [(reading.timestamp, reading.utilization) for reading in found] == [
        (9, 7), (10, 40), (11, 41), (12, 7), (13, 7), (14, 44), (15, 7)
    ]  # fmt: skip
    assert merge([], [], 1.0, now=15.5) == []

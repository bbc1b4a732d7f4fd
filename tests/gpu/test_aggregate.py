"""Several cards as one."""

from __future__ import annotations

from sae_tui.gpu.aggregate import Aggregate, aggregate
from sae_tui.gpu.base import GpuSample

FULL = {"utilization": 90, "memory_used_bytes": 8, "memory_total_bytes": 10, "temperature_c": 70}


def test_sums_and_means_are_over_what_healthy_cards_report():
    cards = [
        GpuSample(0, "GPU-0", "A", 0.0, **FULL, power_w=200.0, power_limit_w=300.0),
        GpuSample(1, "GPU-1", "B", 0.0, **(FULL | {"utilization": 10, "temperature_c": 75})),
        GpuSample(2, "GPU-2", "C", 0.0, **(FULL | {"temperature_c": 99}), healthy=False, reason="lost"),
    ]
    assert aggregate(cards) == Aggregate(3, 16, 20, 50.0, 200.0, 300.0, cards[1])


def test_a_sensor_that_no_card_has_is_unknown_and_a_zero_is_not():
    assert aggregate([]) == Aggregate(0, None, None, None, None, None, None)
    cold = GpuSample(0, "GPU-0", "A", 0.0, utilization=0, temperature_c=0)
    assert aggregate([cold]) == Aggregate(1, None, None, 0.0, None, None, cold)

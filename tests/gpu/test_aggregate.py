"""Tests for totals and means over several GPUs."""

from __future__ import annotations

from sae_tui.gpu.aggregate import Aggregate, ContributingGpus, aggregate
from sae_tui.gpu.base import GpuSample

FULL = {"utilization": 90, "memory_used_bytes": 8, "memory_total_bytes": 10, "temperature_c": 70}


def test_sums_and_means_include_only_reported_values_of_healthy_gpus():
    gpus = [
        GpuSample(0, "GPU-0", "A", 0.0, **FULL, power_w=200.0, power_limit_w=300.0),
        GpuSample(1, "GPU-1", "B", 0.0, **(FULL | {"utilization": 10, "temperature_c": 75})),
        GpuSample(2, "GPU-2", "C", 0.0, **(FULL | {"temperature_c": 99}), healthy=False, reason="lost"),
    ]
    assert aggregate(gpus) == Aggregate(
        gpu_count=3, total_memory_used_bytes=16, total_memory_total_bytes=20, average_utilization=50.0,
        total_power_w=200.0, total_power_limit_w=300.0, max_temperature_c=75, hottest=gpus[1],
        counted=ContributingGpus(2, 2, 1, 2),
    )  # fmt: skip


def test_a_sensor_missing_on_all_gpus_is_unknown_and_zero_counts_as_a_value():
    assert aggregate([]) == Aggregate(gpu_count=0)
    cold = GpuSample(0, "GPU-0", "A", 0.0, utilization=0, temperature_c=0)
    counted = ContributingGpus(0, 1, 0, 1)
    assert aggregate([cold]) == Aggregate(
        gpu_count=1, average_utilization=0.0, max_temperature_c=0, hottest=cold, counted=counted
    )


def test_used_and_total_amounts_are_summed_over_the_same_gpus():
    fields = {"power_w": 300.0, "power_limit_w": 700.0, "memory_used_bytes": 8, "memory_total_bytes": 10}
    gpus = [
        GpuSample(0, "GPU-0", "A", 0.0, **fields),
        GpuSample(1, "GPU-1", "A", 0.0, **(fields | {"power_w": None, "memory_used_bytes": None})),
        GpuSample(2, "GPU-2", "A", 0.0, **(fields | {"power_limit_w": None, "memory_total_bytes": None})),
    ]
    whole = aggregate(gpus)
    assert (whole.total_power_w, whole.total_power_limit_w) == (300.0, 700.0)
    assert (whole.total_memory_used_bytes, whole.total_memory_total_bytes) == (8, 10)
    assert whole.counted == ContributingGpus(memory=1, power=1)


def test_power_is_summed_if_no_gpu_has_a_limit():
    whole = aggregate([GpuSample(index, f"GPU-{index}", "A", 0.0, power_w=100.0) for index in range(2)])
    assert (whole.total_power_w, whole.total_power_limit_w, whole.counted.power) == (200.0, None, 2)

"""Tests for GPU details, which are read only while they are shown, with the real pynvml and a fake driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sae_tui.gpu.base import Condition, GpuSample
from sae_tui.gpu.details import GpuDetails
from sae_tui.gpu.nvml_details import SLOWED_BY
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.simulated import Simulated
from sae_tui.panels.gpu_page import facts

# Defines `flat`, which merges a GPU's details and condition into one dict.
FLAT = """
import json
from dataclasses import asdict
from sae_tui.gpu.nvml import Nvml
def flat(details):
    values = asdict(details)
    return values | values.pop("condition")
"""
READ_DETAILS = f"""{FLAT}
nvml = Nvml()
indices = range(nvml.open())
samples = [nvml.sample(index, processes=True) for index in indices]
print(json.dumps([flat(nvml.details(index, samples[index])) for index in indices]))
"""
# Maps each driver fault to the fields that become unknown.
FAULTS = {
    "no_clock": ["sm_clock_mhz", "memory_clock_mhz"],
    "err_max_clock": ["most_sm_clock_mhz", "most_memory_clock_mhz"],
    "no_fan": ["fan_percent"],
    "no_pstate": ["performance_state"],
    "no_throttle": ["slowed_by"],
    "no_energy": ["energy_j"],
    "perm_pcie": ["pcie_received_bytes_s", "pcie_sent_bytes_s"],
    "no_pcielink": ["pcie_generation", "most_pcie_generation", "pcie_width", "most_pcie_width"],
    "no_nvlink": ["nvlinks"],
    "no_ecc": ["ecc_corrected", "ecc_uncorrected"],
    "no_codec": ["encoder_percent", "decoder_percent"],
    "no_persistence": ["persistence"],
    "no_compute_mode": ["compute_mode"],
    "no_util": ["memory_bandwidth_percent"],
    "no_pci": ["bus_id"],
}
# These fields are always unknown in one reading: there is no Xid error, this driver names no recovery action, and
# measuring activity needs two readings.
UNKNOWN = {"xid", "recovery", "sm_percent", "occupancy_percent", "tensor_percent"}
TWICE = f"""{FLAT}
nvml = Nvml()
indices = range(nvml.open())
for _ in range(2):
    read = [nvml.details(index, nvml.sample(index, processes=True)) for index in indices]
print(json.dumps([flat(one) for one in read]))
"""
SAMPLE = GpuSample(0, "GPU-1", "H200", 0.0, temperature_c=70, memory_used_bytes=1 << 30, memory_total_bytes=2 << 30)


@pytest.fixture(scope="module")
def read(on_nvml: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    def run(faults: dict[int, str] | None = None, **options: Any) -> list[dict[str, Any]]:
        specs = ",".join(f"{index}:{fault}" for index, fault in (faults or {}).items())
        details: list[dict[str, Any]] = on_nvml(READ_DETAILS, FAULTS=specs, **options)
        return details

    return run


def test_a_healthy_gpu_reports_clocks_links_and_faults(read) -> None:
    (gpu,) = read(GPUS=1)
    unknown = {name for name, value in gpu.items() if value is None}
    assert unknown == UNKNOWN
    assert (gpu["most_sm_clock_mhz"], gpu["memory_clock_mhz"]) == (1980, 3201)
    assert (gpu["pcie_generation"], gpu["pcie_width"], gpu["nvlinks"]) == (5, 16, 18)
    assert (gpu["slowdown_c"], gpu["performance_state"], gpu["compute_mode"]) == (92, 0, "shared")
    assert 0 <= gpu["pcie_received_bytes_s"] <= 900_000 * 1024


def test_a_sensor_that_does_not_answer_affects_no_other_value(read) -> None:
    gpus = read(dict(enumerate(FAULTS)), GPUS=len(FAULTS))
    for gpu, (fault, missing) in zip(gpus, FAULTS.items(), strict=True):
        unknown = {name for name, value in gpu.items() if value is None} - UNKNOWN
        assert unknown == set(missing), fault


def test_an_old_driver_also_reports_why_clocks_are_low(read) -> None:
    (gpu,) = read({0: "throttle_on"}, driver="old", GPUS=1)
    assert gpu["slowed_by"] == [SLOWED_BY[0x008], SLOWED_BY[0x040]]


def test_multiprocessor_activity_is_reported_if_the_gpu_counts_it(on_nvml) -> None:
    gpu, other, old = on_nvml(TWICE, GPUS=3, FAULTS="1:no_gpm,2:old_gpm")
    assert 0 < gpu["tensor_percent"] < gpu["occupancy_percent"] < gpu["sm_percent"] <= 50
    assert [one["sm_percent"] for one in (other, old)] == [None, None]
    (gpu,) = on_nvml(TWICE, driver="old", GPUS=1)
    assert gpu["sm_percent"] is None


def test_an_xid_error_is_reported_with_its_number_and_an_explanation(on_nvml) -> None:
    gpu, unheard_of, well, deaf = on_nvml(TWICE, GPUS=4, FAULTS="0:xid=48,1:xid=999,3:xid=48,3:no_events")
    xid = gpu["xid"]
    assert xid["number"] == 48
    assert xid["words"] == "Xid 48: the memory had errors that could not be corrected; reset the GPU"
    assert abs(time.time() - xid["timestamp"]) < 60
    assert unheard_of["xid"]["words"] == "Xid 999, see NVIDIA's list of Xid errors"
    assert (well["xid"], deaf["xid"]) == (None, None)


def test_a_split_gpus_slices_are_listed_with_their_memory(read) -> None:
    split, whole, *_ = read({0: "mig"}, GPUS=2)
    assert [part["name"] for part in split["instances"]] == ["NVIDIA H200 MIG 3g.71gb"] * 2
    assert all(0 < part["memory_used_bytes"] < part["memory_total_bytes"] for part in split["instances"])
    assert whole["instances"] == []
    assert whole["driver"]
    assert whole["cuda"][0] >= 12


def test_a_lost_gpu_has_no_details(read) -> None:
    (gpu,) = read({0: "lost"}, GPUS=1)
    assert {name for name, value in gpu.items() if value not in (None, [])} == {"timestamp"}


def test_the_energy_counter_says_when_it_started() -> None:
    entries = {name: value for group in facts(SAMPLE, GpuDetails(0.0, energy_j=3.6e9)) for name, value, _ in group}
    assert entries["energy"] == "1,000.0 kWh since the driver was loaded"


def test_unknown_values_are_left_out_and_faults_are_highlighted() -> None:
    assert facts(SAMPLE, GpuDetails(0.0)) == [
        [("temperature", "70°C", "middle")],
        [("UUID", "GPU-1", "dim")],
    ]
    slowed = ("power limit reached",)
    failing = GpuDetails(0.0, Condition(slowed_by=slowed, ecc_uncorrected=3, rows_failed=True, slowdown_c=65))
    entries = {name: (value, style) for group in facts(SAMPLE, failing) for name, value, style in group}
    assert entries["slowed by"] == ("power limit reached", "warn")
    assert entries["uncorrected"] == ("3", "bad")
    assert entries["temperature"] == ("70°C", "high")
    assert entries[""] == ("a row could not be remapped; the GPU is failing", "bad")


class Counting(Simulated):
    """Simulated GPUs that count how often each GPU's details are read."""

    def __init__(self) -> None:
        super().__init__(3)
        self.reads = [0, 0, 0]

    def details(self, index: int, sample: GpuSample) -> GpuDetails:
        self.reads[index] += 1
        if index == 2:
            raise OSError("no particulars")
        return super().details(index, sample)


def test_details_are_read_only_for_the_gpu_on_screen(until) -> None:
    source = Counting()
    sampler = Sampler(source, 0.05)
    sampler.start()
    until(lambda: len(sampler.latest()) == 3 and all(sample.healthy for sample in sampler.latest()))
    assert source.reads == [0, 0, 0]
    assert sampler.details(1) is None
    sampler.look_at(1)
    until(lambda: sampler.details(1) is not None)
    assert sampler.details(0) is None
    sampler.look_at(2)
    until(lambda: source.reads[2] > 2)
    assert sampler.details(2) is None
    assert sampler.latest()[2].healthy
    sampler.look_at(None)
    assert source.reads[0] == 0
    assert sampler.stop()


def test_details_for_the_gpu_on_screen_are_read_at_once(until) -> None:
    sampler = Sampler(Counting(), 3600.0)
    sampler.start()
    until(lambda: len(sampler.latest()) == 3 and all(sample.healthy for sample in sampler.latest()))
    sampler.look_at(0)
    until(lambda: sampler.details(0) is not None)
    assert sampler.stop()


SAMPLE_ONCE = """
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
nvml.open()
nvml.sample(0, processes=True)
print(0)
"""


def test_pcie_traffic_is_not_measured_while_no_details_are_shown(on_nvml, tmp_path: Path) -> None:
    log = tmp_path / "calls"
    on_nvml(SAMPLE_ONCE, GPUS=1, LOG=log)
    (file,) = tmp_path.glob("calls.*")
    assert "nvmlDeviceGetUtilizationRates" in file.read_text()
    assert "Pcie" not in file.read_text()

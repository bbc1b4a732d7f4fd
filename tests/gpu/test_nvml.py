"""Tests for `Nvml` with the real pynvml and a fake driver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Read = Callable[..., list[dict[str, Any]]]
Run = Callable[..., Any]
SENSORS = ("utilization", "memory_used_bytes", "memory_total_bytes", "temperature_c", "power_w")

GPU_FAULTS = {
    "lost": "fallen off the bus",
    "unknown": "unknown error",
    "reset": "needs a reset",
    "os": "operating system blocks",
    "noperm": "no permission",
    "timeout": "did not respond",
    "irq": "interrupts",
}
FIELD_FAULTS = {
    "no_power": ("power_w", None),
    "no_util": ("utilization", None),
    "no_temp": ("temperature_c", None),
    "no_memory_info": ("memory_used_bytes", None),
    "no_power_limit": ("power_limit_w", None),
    "fnf_power": ("power_w", None),
    "fnf_memory_info": ("memory_used_bytes", None),
    "mem_zero": ("memory_used_bytes", None),
    "err_power": ("power_w", "unknown error"),
    "err_util": ("utilization", "unknown error"),
    "err_temp": ("temperature_c", "unknown error"),
    "err_memory_info": ("memory_used_bytes", "unknown error"),
    "perm_memory_info": ("memory_used_bytes", "no permission"),
    "lost_util": ("utilization", "GPU lost"),
    "nodata_util": ("utilization", "no data"),
    "notready_temp": ("temperature_c", "not ready"),
}
PROCESS_FAULTS = (
    "plain", "procs_na", "dead_pids", "no_procs", "perm_procs", "both_lists", "bad_pids", "no_gprocs", "perm_gprocs",
)  # fmt: skip
IDENTITY_FAULTS = ("no_name", "err_name", "bad_name", "long_name", "no_uuid", "err_uuid")


@pytest.fixture(scope="module")
def with_gpu_faults(read_all: Read) -> list[dict[str, Any]]:
    """Read GPUs that each have one fault, except for the first and the last, which have none."""
    return read_all(dict(enumerate(GPU_FAULTS, start=1)), GPUS=len(GPU_FAULTS) + 2)


@pytest.fixture(scope="module")
def with_field_faults(read_all: Read) -> dict[str, dict[str, Any]]:
    samples = read_all(dict(enumerate(FIELD_FAULTS)), GPUS=len(FIELD_FAULTS))
    return dict(zip(FIELD_FAULTS, samples, strict=True))


@pytest.fixture(scope="module")
def with_identity_faults(read_all: Read) -> dict[str, dict[str, Any]]:
    return dict(zip(IDENTITY_FAULTS, read_all(dict(enumerate(IDENTITY_FAULTS)), GPUS=6), strict=True))


@pytest.fixture(scope="module")
def with_process_faults(read_all: Read) -> dict[str, dict[str, Any]]:
    """Read GPUs that each run the test process and have a different fault."""
    n = len(PROCESS_FAULTS)
    pids = ",".join([str(os.getpid())] * n)
    return dict(zip(PROCESS_FAULTS, read_all(dict(enumerate(PROCESS_FAULTS)), GPUS=n, PIDS=pids), strict=True))


def test_a_healthy_gpu_reports_every_field(read_all: Read) -> None:
    (sample,) = read_all(GPUS=1, NAME="NVIDIA A100", MEM_MIB=40960, PIDS=os.getpid(), PID_MIB=1024)
    assert sample["healthy"]
    assert sample["failed"] == {}
    assert sample["name"] == "NVIDIA A100"
    assert sample["uuid"].startswith("GPU-fa4e0000")
    assert sample["memory_total_bytes"] == 40960 << 20
    assert 0 < sample["memory_used_bytes"] < 40960 << 20
    assert 0 <= sample["utilization"] <= 100
    assert 70 < sample["power_w"] < sample["power_limit_w"] == 700
    assert 30 < sample["temperature_c"] < 80
    assert abs(sample["timestamp"] - time.time()) < 60
    assert [process["pid"] for process in sample["processes"]] == [os.getpid()]


@pytest.mark.parametrize("fault", GPU_FAULTS)
def test_an_unreadable_gpu_is_listed_with_the_reason(with_gpu_faults: list[dict[str, Any]], fault: str) -> None:
    sample = with_gpu_faults[1 + list(GPU_FAULTS).index(fault)]
    assert not sample["healthy"]
    assert GPU_FAULTS[fault] in sample["reason"]
    assert all(sample[field] is None for field in (*SENSORS, "processes"))


def test_faulty_gpus_do_not_shift_indices_or_affect_other_gpus(with_gpu_faults: list[dict[str, Any]]) -> None:
    assert [sample["index"] for sample in with_gpu_faults] == list(range(len(with_gpu_faults)))
    first, last = with_gpu_faults[0], with_gpu_faults[-1]
    assert first["healthy"]
    assert last["healthy"]
    assert last["uuid"].startswith(f"GPU-{0xFA4E0000 + last['index']:x}")


def test_a_gpu_whose_uuid_was_never_read_has_a_marked_placeholder(with_gpu_faults: list[dict[str, Any]]) -> None:
    assert with_gpu_faults[1]["uuid"] == "GPU-index-1"
    assert with_gpu_faults[1]["failed"] == {"uuid": "unknown"}


@pytest.mark.parametrize("fault", FIELD_FAULTS)
def test_a_failing_field_does_not_affect_other_fields(with_field_faults: dict[str, dict[str, Any]], fault: str) -> None:
    field, words = FIELD_FAULTS[fault]
    sample = with_field_faults[fault]
    assert sample["healthy"], sample["reason"]
    assert sample[field] is None
    assert sample["failed"] == ({field: words} if words else {})
    others = set(SENSORS) - {field}
    if field == "memory_used_bytes":
        others.remove("memory_total_bytes")
        assert sample["memory_total_bytes"] is None
    assert all(sample[other] is not None for other in others)


def test_a_gpu_whose_sensors_all_fail_is_unhealthy(read_all: Read) -> None:
    (sample,) = read_all({0: "err_util,0:err_memory_info,0:err_temp,0:err_power"}, GPUS=1)
    assert not sample["healthy"]
    assert "unknown error" in sample["reason"]
    assert sample["name"] == "NVIDIA H200"


def test_values_beyond_the_usual_range_are_kept_as_the_driver_reports_them(read_all: Read) -> None:
    samples = read_all({0: "util_hi", 1: "power_w=1200"}, GPUS=2)
    assert samples[0]["utilization"] == 105
    assert samples[1]["power_w"] == 1200.0


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("no_name", "NVIDIA GPU"),
        ("err_name", "NVIDIA GPU"),
        ("bad_name", "NVIDIA \ufffd\ufffd GPU"),
        ("long_name", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition Extra"),
    ],
)
def test_an_unreadable_name_affects_no_other_field(
    with_identity_faults: dict[str, dict[str, Any]], fault: str, name: str
) -> None:
    sample = with_identity_faults[fault]
    assert sample["name"] == name
    assert sample["healthy"]
    assert all(sample[field] is not None for field in SENSORS)


@pytest.mark.parametrize(("fault", "words"), [("no_uuid", "not supported"), ("err_uuid", "unknown error")])
def test_an_unreadable_uuid_becomes_a_marked_placeholder(
    with_identity_faults: dict[str, dict[str, Any]], fault: str, words: str
) -> None:
    sample = with_identity_faults[fault]
    assert sample["uuid"] == f"GPU-index-{sample['index']}"
    assert sample["failed"] == {"uuid": words}
    assert sample["utilization"] is not None


def test_a_process_is_listed_with_its_user_command_and_memory(with_process_faults: dict[str, dict[str, Any]]) -> None:
    import psutil

    (process,) = with_process_faults["plain"]["processes"]
    assert process["pid"] == os.getpid()
    assert process["user"] == psutil.Process().username()
    assert process["name"].startswith(os.path.basename(psutil.Process().cmdline()[0]))
    assert process["memory_used_bytes"] == 61440 << 20


@pytest.mark.parametrize(("fault", "words"), [("no_procs", None), ("perm_procs", "no permission")])
def test_a_process_list_that_cannot_be_read_is_none_instead_of_empty(
    with_process_faults: dict[str, dict[str, Any]], fault: str, words: str | None
) -> None:
    sample = with_process_faults[fault]
    assert sample["processes"] is None
    assert sample["failed"].get("processes") == words
    assert sample["utilization"] is not None


def test_process_memory_hidden_by_the_driver_is_none(with_process_faults: dict[str, dict[str, Any]]) -> None:
    (process,) = with_process_faults["procs_na"]["processes"]
    assert process["pid"] == os.getpid()
    assert process["memory_used_bytes"] is None


def test_a_process_outside_this_pid_namespace_keeps_its_pid(with_process_faults: dict[str, dict[str, Any]]) -> None:
    processes = with_process_faults["dead_pids"]["processes"]
    assert [process["pid"] for process in processes] == [4000010, 4000011]
    assert all(process["user"] is process["name"] is None for process in processes)


def test_a_process_in_both_the_compute_and_graphics_lists_is_shown_once(
    with_process_faults: dict[str, dict[str, Any]],
) -> None:
    (process,) = with_process_faults["both_lists"]["processes"]
    assert process["memory_used_bytes"] == 61440 << 20


def test_impossible_pids_are_left_out(with_process_faults: dict[str, dict[str, Any]]) -> None:
    assert [process["pid"] for process in with_process_faults["bad_pids"]["processes"]] == [os.getpid()]


@pytest.mark.parametrize("fault", ["no_gprocs", "perm_gprocs"])
def test_compute_processes_are_listed_even_if_graphics_processes_cannot_be(
    with_process_faults: dict[str, dict[str, Any]], fault: str
) -> None:
    assert [process["pid"] for process in with_process_faults[fault]["processes"]] == [os.getpid()]


def test_an_old_driver_provides_every_field_through_older_calls(read_all: Read) -> None:
    (sample,) = read_all(driver="old", GPUS=1, PIDS=os.getpid())
    assert sample["failed"] == {}
    assert all(sample[field] is not None for field in SENSORS)
    assert [process["pid"] for process in sample["processes"]] == [os.getpid()]


@pytest.mark.slow
def test_sixteen_gpus_have_distinct_indices_and_uuids(read_all: Read) -> None:
    samples = read_all(GPUS=16)
    assert [sample["index"] for sample in samples] == list(range(16))
    assert len({sample["uuid"] for sample in samples}) == 16


def test_a_temporarily_lost_gpu_keeps_its_identity_and_comes_back(on_nvml: Run, tmp_path: Path) -> None:
    script = """
import json, time
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
nvml.open()
seen, unhealthy = [], 0
deadline = time.monotonic() + 20
while len(seen) < 3 and time.monotonic() < deadline:
    sample = nvml.sample(1, processes=False)
    unhealthy += not sample.healthy
    if not seen or seen[-1][0] != sample.healthy:
        seen.append((sample.healthy, sample.uuid, sample.name, sample.reason, dict(sample.failed)))
print(json.dumps([seen, unhealthy]))
"""
    (before, lost, back), unhealthy = on_nvml(script, FAULTS="1:lost@0.3-0.5", LOG=tmp_path / "calls")
    assert (before[0], lost[0], back[0]) == (True, False, True)
    assert lost[1:3] == before[1:3] == back[1:3]
    assert "fallen off the bus" in lost[3]
    assert lost[4] == back[4] == {}
    # Each of the 8 GPUs is looked up once to search for slices. Then only GPU 1 is looked up: at its first reading, and
    # again after each failed reading.
    assert calls_in(tmp_path)["nvmlDeviceGetHandleByIndex_v2"] == 8 + 1 + unhealthy


@pytest.mark.parametrize(
    ("variables", "reason", "remedy"),
    [
        ({"INIT_ERROR": 9}, "driver is not loaded", "modprobe"),
        ({"INIT_ERROR": 18}, "different versions", "reboot"),
        ({"INIT_ERROR": 4}, "no permission", "/dev/nvidia"),
        ({"INIT_ERROR": 11}, "interrupts", "dmesg"),
        ({"INIT_ERROR": 12}, "no NVIDIA driver library", "install"),
        ({"INIT_ERROR": 999}, "error 999", "nvidia-smi"),
        ({"COUNT_ERROR": 999}, "error 999", "nvidia-smi"),
        ({"GPUS": 0}, "sees no GPUs", "nvidia-smi -L"),
        ({"driver": "none"}, "no NVIDIA driver library", "install"),
    ],
)
def test_a_source_that_cannot_be_opened_reports_a_reason_and_a_remedy(
    on_nvml: Run, variables: dict[str, Any], reason: str, remedy: str
) -> None:
    answer = on_nvml(OPEN, **variables)
    assert reason in answer[0]
    assert remedy in answer[1]


@pytest.mark.parametrize("module", ["raise ImportError('half installed')", "def nvmlInit(): pass"])
def test_another_module_called_pynvml_is_named_as_the_cause(on_nvml: Run, tmp_path: Path, module: str) -> None:
    (tmp_path / "pynvml.py").write_text(module)
    reason, remedy = on_nvml(OPEN, path=tmp_path)
    assert "pynvml" in reason
    assert "nvidia-ml-py" in remedy


def test_a_driver_that_appears_later_is_found_when_the_source_is_opened_again(on_nvml: Run) -> None:
    script = """
import json, os
from sae_tui.gpu.base import SourceUnavailable
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
try:
    nvml.open()
except SourceUnavailable:
    import ctypes
    ctypes.CDLL(None).setenv(b"FAKE_NVML_INIT_ERROR", b"0", 1)
print(json.dumps(nvml.open()))
"""
    assert on_nvml(script, INIT_ERROR=9, GPUS=3) == 3


def test_importing_the_module_does_not_load_pynvml(on_nvml: Run) -> None:
    script = """
import json, sys
import sae_tui.gpu.nvml, sae_tui.gpu.sampler, sae_tui.gpu.history, sae_tui.gpu.simulated
print(json.dumps([name for name in ("pynvml", "psutil", "torch", "numpy", "textual", "rich") if name in sys.modules]))
"""
    assert on_nvml(script) == []


def test_the_energy_counter_is_read_at_intervals_and_converted_to_joules(on_nvml: Run) -> None:
    script = """
import json
from sae_tui.gpu.nvml import ENERGY_EVERY, Nvml
nvml = Nvml()
nvml.open()
samples = [nvml.sample(0, processes=place % 2 == 0) for place in range(2 * ENERGY_EVERY + 1)]
print(json.dumps([place for place, one in enumerate(samples) if one.energy_j is not None]))
"""
    assert on_nvml(script) == [0, 20]


def test_eight_busy_gpus_cost_at_most_sixty_calls_a_second(on_nvml: Run, tmp_path: Path) -> None:
    script = """
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
for second in range(60):
    for index in range(nvml.open() if not second else 8):
        nvml.sample(index, processes=second % 3 == 0)
print(0)
"""
    on_nvml(script, GPUS=8, PIDS=",".join([str(os.getpid())] * 8), LOG=tmp_path / "calls")
    calls = calls_in(tmp_path)
    print(f"{sum(calls.values()) / 60:.1f} calls per second: {calls}")
    assert calls["nvmlDeviceGetUtilizationRates"] == 480
    # Two calls per GPU, which find its slices, are made only once.
    assert (sum(calls.values()) - 2 * 8) / 60 <= 60


OPEN = """
import json
from sae_tui.gpu.base import SourceUnavailable
from sae_tui.gpu.nvml import Nvml
try:
    print(json.dumps(["opened", Nvml().open()]))
except SourceUnavailable as error:
    print(json.dumps([error.reason, error.remedy]))
"""


def calls_in(folder: Path) -> dict[str, int]:
    """Return the number of calls to each function, as logged by the library when its process exits."""
    (log,) = folder.iterdir()
    return {line.split()[1]: int(line.split()[2]) for line in log.read_text().splitlines()}


def test_old_and_new_calls_report_free_memory_as_the_driver_does(read_all: Read) -> None:
    for driver in ("new", "old"):
        (sample,) = read_all(driver=driver, GPUS=1)
        in_use = sample["memory_total_bytes"] - sample["memory_free_bytes"]
        reserved = in_use - sample["memory_used_bytes"]
        assert reserved == (600 << 20 if driver == "new" else 0)  # old calls count reserved memory as used
    (hidden,) = read_all({0: "no_memory_info"}, GPUS=1)
    assert hidden["memory_free_bytes"] is None


def test_the_power_limit_is_read_again_whenever_processes_are_read(on_nvml: Run) -> None:
    script = """
import json, pynvml
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
nvml.open()
limits = [nvml.sample(0, processes=True).power_limit_w]
pynvml.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 300_000
limits += [nvml.sample(0, processes=processes).power_limit_w for processes in (False, True, False)]
print(json.dumps(limits))
"""
    assert on_nvml(script) == [700, 700, 300, 300]


def test_a_gpu_stays_usable_if_its_uuid_cannot_be_read_again(on_nvml: Callable[..., Any]) -> None:
    script = """
import json, pynvml
from sae_tui.gpu import nvml as module
from sae_tui.gpu.nvml import Nvml
module.CONDITION_EVERY_S = 0.0
nvml = Nvml()
nvml.open()
seen = [nvml.sample(0, processes=True)]
def fails(*arguments):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
pynvml.nvmlDeviceGetUUID, read = fails, pynvml.nvmlDeviceGetUUID
seen.append(nvml.sample(0, processes=True))
pynvml.nvmlDeviceGetUUID = read
seen.append(nvml.sample(0, processes=True))
print(json.dumps([[one.uuid, dict(one.failed)] for one in seen]))
"""
    known, unread, again = on_nvml(script, GPUS=1, PIDS="")
    assert known[1] == {}
    assert known == unread == again

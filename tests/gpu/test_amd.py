"""Tests for `Amd` with AMD's Python module and a fake version of AMD's library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import amd_shapes
from support.amd_driver import build_library, environment, module_folder

from sae_tui.gpu import amd, amd_faults
from sae_tui.gpu.amd import Amd
from sae_tui.gpu.base import SourceUnavailable

Run = Callable[..., Any]
READ = """
import json
from dataclasses import asdict
from sae_tui.gpu.amd import Amd
amd = Amd()
print(json.dumps([asdict(amd.sample(index, processes=True)) for index in range(amd.open())]))
"""
OPEN = """
import json
from sae_tui.gpu.base import SourceUnavailable
from sae_tui.gpu.amd import Amd
try:
    print(json.dumps(["opened", Amd().open()]))
except SourceUnavailable as error:
    print(json.dumps([error.reason, error.remedy]))
"""
SENSORS = ("utilization", "memory_used_bytes", "memory_total_bytes", "temperature_c", "power_w", "power_limit_w")
GIB = 1 << 30


@pytest.fixture(scope="module")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a folder laid out like a ROCm installation."""
    if (module := module_folder()) is None:
        pytest.skip("amdsmi is not installed")
    return build_library(tmp_path_factory.mktemp("rocm"), module)


@pytest.fixture(scope="module")
def on_amd(rocm: Path) -> Run:
    """Return a function that runs a script with the fake library and returns its JSON output."""

    def run(script: str, **variables: Any) -> Any:
        extra = {name: variables.pop(name) for name in ("ROCM_PATH", "PYTHONPATH") if name in variables}
        env = environment(rocm, **variables) | extra
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_a_healthy_gpu_reports_every_field(on_amd: Run) -> None:
    idle, used = on_amd(READ, PIDS=f"0,{os.getpid()}")
    assert (idle["name"], idle["uuid"], idle["failed"]) == ("AMD Instinct MI300X", "GPU-9f3a5c00d1e2f0a0", {})
    assert used["uuid"] == "GPU-9f3a5c00d1e2f0a1"
    assert [used[name] for name in SENSORS] == [42, (60 * 1024 + 283) << 20, 196592 << 20, 58, 413, 750]
    assert used["energy_j"] == pytest.approx(2e9 * 15.259e-6)
    (process,) = used["processes"]
    assert (process["pid"], process["memory_used_bytes"]) == (os.getpid(), 60 * GIB)
    assert process["user"]
    assert used["condition"] == {
        "sm_clock_mhz": 1987, "fan_percent": 40, "slowdown_c": 100, "performance_state": None, "xid": None,
        "slowed_by": ["power, current or temperature limit reached"],
        "compute_mode": None, "ecc_uncorrected": 0, "rows_pending": None, "rows_failed": None,
        "recovery": None,
    }  # fmt: skip
    assert idle["processes"] == idle["condition"]["slowed_by"] == []


def test_a_failing_sensor_affects_no_other_sensor_and_no_other_gpu(on_amd: Run) -> None:
    cases = {
        "busy=14": ("utilization", "cannot be read"), "busy=na": ("utilization", None),
        "memory=8": ("memory_used_bytes", "timed out"), "memory=na": ("memory_used_bytes", None),
        "junction=12": ("temperature_c", "cannot be read"),
        "power=10": ("power_w", "no permission"), "power=2": ("power_w", None), "power=na": ("power_w", None),
        "cap=2": ("power_limit_w", None), "processes=10": ("processes", "no permission"),
    }  # fmt: skip
    faults = ",".join(f"{index}:{fault}" for index, fault in enumerate(cases))
    *samples, last = on_amd(READ, FAULTS=faults, GPUS=len(cases) + 1)
    for (field, words), sample in zip(cases.values(), samples, strict=True):
        missing = {field} | ({"memory_total_bytes"} if field == "memory_used_bytes" else set())
        assert sample["healthy"]
        assert sample["failed"] == ({field: words} if words else {})
        assert {name for name in (*SENSORS, "processes") if sample[name] is None} == missing
    assert last["failed"] == {}


def test_a_gpu_without_a_hotspot_sensor_reports_the_edge_temperature(on_amd: Run) -> None:
    sample, _ = on_amd(READ, FAULTS="0:junction=2")
    assert sample["temperature_c"] == 51


def test_a_gpu_name_cannot_control_the_terminal(on_amd: Run) -> None:
    sample, _ = on_amd(READ, NAME="MI\x1b[2J\n300")
    assert sample["name"] == "MI\ufffd[2J\ufffd300"


def test_a_lost_gpu_is_listed_with_the_reason_and_does_not_shift_the_indices(on_amd: Run) -> None:
    lost, named, other = on_amd(READ, FAULTS="0:all=14,1:busy=31,1:memory=31,1:junction=31,1:power=31", GPUS=3)
    assert (lost["healthy"], lost["uuid"], lost["name"]) == (False, "GPU-index-0", "AMD GPU")
    assert "none of the GPU's sensors respond" in lost["reason"]
    assert lost["failed"] == {"uuid": "unknown"}
    assert (named["reason"], named["name"]) == ("the driver no longer recognises this GPU", "AMD Instinct MI300X")
    assert (other["index"], other["healthy"], other["uuid"]) == (2, True, "GPU-9f3a5c00d1e2f0a2")


def test_a_temporarily_lost_gpu_keeps_its_identity_and_comes_back(on_amd: Run) -> None:
    script = """
import ctypes, json
from sae_tui.gpu.amd import Amd
amd = Amd()
amd.open()
seen = []
for faults in (b"", b"1:all=2", b""):
    ctypes.CDLL(None).setenv(b"FAKE_AMD_SMI_FAULTS", faults, 1)
    sample = amd.sample(1, processes=False)
    seen.append([sample.healthy, sample.uuid, sample.name, sample.reason])
print(json.dumps(seen))
"""
    before, lost, back = on_amd(script)
    assert (before[0], lost[0], back[0]) == (True, False, True)
    assert before[1:3] == lost[1:3] == back[1:3]
    assert "none of the GPU's sensors respond any more" in lost[3]


def test_a_hanging_gpu_does_not_block_another(on_amd: Run) -> None:
    script = """
import json
from sae_tui.gpu.amd import Amd
from sae_tui.threads import on_thread
amd = Amd()
amd.open()
stuck, other = [on_thread(lambda index=index: amd.sample(index, processes=True)) for index in (0, 1)]
answer = other.result(20)
print(json.dumps([answer.healthy, stuck.done()]), flush=True)
__import__("os")._exit(0)
"""
    assert on_amd(script, FAULTS="0:power=hang") == [True, False]


def test_a_partition_of_a_split_gpu_cannot_be_used(on_amd: Run) -> None:
    whole, part = on_amd(READ, FAULTS="1:partition=CPX")
    assert whole["unusable"] == ""
    assert "split GPU (CPX)" in part["unusable"]
    assert part["memory_used_bytes"] is not None


def test_details_and_facts_are_read(on_amd: Run) -> None:
    script = """
import json
from dataclasses import asdict
from sae_tui.gpu.amd import Amd
amd = Amd()
amd.open()
sample = amd.sample(0, processes=False)
facts = amd.facts()
print(json.dumps([asdict(amd.details(0, sample)), facts.driver, [asdict(pair) for pair in facts.pairs], facts.nvlinks]))
"""
    details, driver, pairs, links = on_amd(script, GPUS=3)
    del details["timestamp"]
    details |= details.pop("condition")
    assert {name: value for name, value in details.items() if value not in (None, [])} == {
        "memory_bandwidth_percent": 17, "sm_clock_mhz": 1987, "most_sm_clock_mhz": 2100, "memory_clock_mhz": 1300,
        "most_memory_clock_mhz": 1300, "slowdown_c": 100, "fan_percent": 40, "energy_j": pytest.approx(30518, abs=1),
        "pcie_generation": 4, "most_pcie_generation": 5, "pcie_width": 16, "most_pcie_width": 16, "ecc_corrected": 3,
        "ecc_uncorrected": 0, "bus_id": "0000:0c:00.0", "driver": "6.12.12",
    }  # fmt: skip
    assert (driver, links) == ("6.12.12", [2, 2, 2])
    assert pairs[0] == {
        "first": 0, "second": 1, "path": None, "nvlink": True, "peer_to_peer": True, "obstacle": ""
    }  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "reason", "remedy"),
    [
        ({"INIT": 34}, "driver is not loaded", "modprobe amdgpu"),
        ({"INIT": 10}, "no permission", "usermod -aG render,video"),
        ({"INIT": 18}, "error 18", "amd-smi list"),
        ({"GPUS": 0}, "sees no GPUs", "--device=/dev/kfd"),
        ({"ROCM_PATH": "/nowhere"}, "ROCm's library libamd_smi.so is missing", "amd-smi-lib"),
    ],
)
def test_a_source_that_cannot_be_opened_reports_a_reason_and_a_remedy(
    on_amd: Run, variables: dict[str, Any], reason: str, remedy: str
) -> None:
    answer = on_amd(OPEN, **variables)
    assert reason in answer[0]
    assert remedy in answer[1]


@pytest.mark.parametrize(
    ("shapes", "clock", "bandwidth"),
    [(amd_shapes.ROCM_6_0, 1700, None), (amd_shapes.ROCM_6_2, 1700, None), (amd_shapes.ROCM_7_0, 1700, None)],
    ids=["6.0", "6.2", "7.0"],
)
def test_values_from_every_rocm_version_are_read_in_the_same_way(
    shapes: dict[str, Any], clock: int, bandwidth: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amd, "load_amdsmi", lambda: amd_shapes.module(**shapes))
    source = Amd()
    source.open()
    sample = source.sample(0, processes=True)
    assert (sample.name, sample.uuid) == ("AMD GPU 0x740f", "GPU-00a1b2c3d4e5f607")
    assert [getattr(sample, name) for name in SENSORS] == [97, 12 << 20, 65520 << 20, 61, 203, 300]
    assert sample.energy_j == pytest.approx(30518)
    assert sample.condition is not None
    assert sample.condition.sm_clock_mhz == clock
    assert [(each.pid, each.memory_used_bytes) for each in sample.processes or ()] == [(0xFFFF, 5 << 20)]
    assert source.details(0, sample).memory_bandwidth_percent is bandwidth


def test_a_slow_gpu_still_reports_errors_that_forbid_its_use(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {"correctable_count": 0, "uncorrectable_count": 3}
    smi = amd_shapes.module(**amd_shapes.ROCM_7_0, amdsmi_get_gpu_total_ecc_count=errors)
    monkeypatch.setattr(amd, "load_amdsmi", lambda: smi)
    monkeypatch.setattr(amd, "SLOW_S", -1.0)
    source = Amd()
    source.open()
    sample = source.sample(0, processes=True)
    assert "3 uncorrected memory errors" in sample.obstacle
    assert sample.condition is not None
    assert sample.condition.sm_clock_mhz is None


def test_an_infinite_or_nan_answer_counts_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (float("inf"), float("nan"), -float("inf")):
        smi = amd_shapes.module(**amd_shapes.ROCM_7_0 | {"amdsmi_get_gpu_activity": {"gfx_activity": value}})
        monkeypatch.setattr(amd, "load_amdsmi", lambda smi=smi: smi)
        source = Amd()
        source.open()
        sample = source.sample(0, processes=True)
        assert (sample.utilization, sample.power_w) == (None, 203)


def test_a_gpu_without_a_serial_number_gets_a_placeholder_marked_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in ({"market_name": "N/A", "asic_serial": "N/A"}, ValueError("no number")):
        smi = amd_shapes.module(**amd_shapes.ROCM_7_0, amdsmi_get_gpu_asic_info=answer)
        monkeypatch.setattr(amd, "load_amdsmi", lambda smi=smi: smi)
        source = Amd()
        source.open()
        sample = source.sample(0, processes=False)
        assert (sample.name, sample.uuid, sample.healthy) == ("AMD GPU", "GPU-index-0", True)
        assert sample.failed["uuid"] in ("not supported", "unknown")


def test_a_user_without_compute_permission_is_warned_even_if_gpus_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amd, "load_amdsmi", lambda: amd_shapes.module(**amd_shapes.ROCM_7_0))
    monkeypatch.setattr(amd_faults, "COMPUTE_FILE", str(tmp_path))
    source = Amd()
    source.open()
    assert source.facts().faults == ()
    monkeypatch.setattr(amd_faults.os, "access", lambda *_: False)
    (fault,) = source.facts().faults
    assert "without which PyTorch sees no AMD GPU" in fault.sentence
    assert "usermod -aG render,video" in fault.remedy
    monkeypatch.setattr(amd, "load_amdsmi", lambda: amd_shapes.module(amdsmi_get_processor_handles=[]))
    with pytest.raises(SourceUnavailable, match="no permission to use the AMD driver"):
        Amd().open()


# This script follows a sampler through stages. When a stage's condition becomes true, the script changes the fake
# library's environment variables.
FOLLOW = """
import json, os, time
from sae_tui.gpu import sampler as module
from sae_tui.gpu.amd import Amd
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.several import Several
module.REOPEN_EVERY_S, module._REOPEN_AFTER_S, module.PROCESSES_EVERY_S = 0.3, 0.3, 0.1
stages = {stages}
sampler = Sampler({source}, 0.05)
sampler.start()
changed, until = [], time.monotonic() + 50
while time.monotonic() < until and stages:
    rows = [[one.uuid, one.healthy, one.reason] for one in sampler.latest()]
    problem = str(sampler.problem or "")
    are_read = bool(rows) and all(healthy for _, healthy, _ in rows)
    if eval(stages[0][0]):
        changed.append(time.time())
        os.environ.update(stages.pop(0)[1])
    time.sleep(0.02)
rings = [[reading.timestamp > changed[1] for reading in sampler.ring(index).since(None, one.uuid)[0]]
         for index, one in enumerate(sampler.latest())]
print(json.dumps([rows, problem, len(stages), rings, sampler.stop(2)]))
"""
RELOADED = {"FAKE_AMD_SMI_DRIVER": "2"}
FIRST, SECOND, OTHER = (f"GPU-9f3a5c00d1e2f0{end}" for end in ("a0", "a1", "ff"))


@pytest.mark.parametrize("source", ["Amd()", "Several([Amd()])"])
@pytest.mark.parametrize(
    ("after", "uuids"),
    [
        ({}, [FIRST, SECOND]),
        ({"FAKE_AMD_SMI_GPUS": "1"}, [FIRST]),
        ({"FAKE_AMD_SMI_GPUS": "3"}, [FIRST, SECOND, "GPU-9f3a5c00d1e2f0a2"]),
        ({"FAKE_AMD_SMI_FAULTS": "1:serial=0x9F3A5C00D1E2F0FF"}, [FIRST, OTHER]),
    ],
    ids=["the same", "one removed", "one added", "one exchanged"],
)
def test_the_sampler_recovers_when_the_amd_driver_is_reloaded(
    on_amd: Run, source: str, after: dict[str, str], uuids: list[str]
) -> None:
    away = "'not loaded' in problem and len(rows) == 2 and all('not loaded' in reason for *_, reason in rows)"
    stages = [
        ("are_read and len(sampler.ring(1)) > 5", {"FAKE_AMD_SMI_DRIVER": "0"}),
        (away, RELOADED | after),
        (f"are_read and not problem and [uuid for uuid, *_ in rows] == {uuids}", {}),
    ]
    script = FOLLOW.replace("{stages}", repr(stages)).replace("{source}", source)
    *_, n_left, rings, has_ended = on_amd(script, DRIVER=1, GPUS=2, FAULTS="")
    assert (n_left, has_ended) == (0, True)
    if OTHER in uuids:
        assert not all(rings[0])
        assert rings[1]
        assert all(rings[1])  # the buffers contain no readings from the previous GPU


@pytest.mark.parametrize("change", [RELOADED, RELOADED | {"FAKE_AMD_SMI_GPUS": "1"}], ids=["reset", "removed"])
def test_amd_gpus_are_found_again_after_a_driver_reload_between_two_readings(
    on_amd: Run, change: dict[str, str]
) -> None:
    n_gpus = int(change.get("FAKE_AMD_SMI_GPUS", 2))
    stages = [("are_read", change), ("not are_read", {}), (f"are_read and len(rows) == {n_gpus}", {})]
    script = FOLLOW.replace("{stages}", repr(stages)).replace("{source}", "Amd()")
    rows, problem, n_left, _, _ = on_amd(script, DRIVER=1, GPUS=2, FAULTS="")
    assert (n_left, problem) == (0, ""), rows


def test_an_amd_gpu_that_replaces_a_failed_one_has_its_own_uuid(on_amd: Run) -> None:
    stages = [
        ("are_read", {"FAKE_AMD_SMI_FAULTS": "1:all=14"}),
        ("[healthy for _, healthy, _ in rows] == [True, False]", {"FAKE_AMD_SMI_FAULTS": f"1:serial=0x{OTHER[4:]}"}),
        (f"are_read and rows[1][0] == {OTHER!r}", {}),
    ]
    script = FOLLOW.replace("{stages}", repr(stages)).replace("{source}", "Amd()")
    assert on_amd(script, DRIVER=1, GPUS=2, FAULTS="")[2] == 0


def test_closing_one_source_of_amd_gpus_leaves_the_library_open_for_another(on_amd: Run) -> None:
    script = """
import json
from sae_tui.gpu.amd import Amd
shown, checked = Amd(), Amd()
shown.open(), checked.open()
checked.close()
healthy = [shown.sample(0, processes=True).healthy]
shown.close()
healthy.append(shown.sample(0, processes=True).healthy)
print(json.dumps(healthy))
"""
    assert on_amd(script) == [True, False]

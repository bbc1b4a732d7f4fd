"""Tests that an impossible reading affects only one sensor of one GPU, whose value becomes unknown."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from support.driver import environment

from sae_tui.gpu.aggregate import aggregate
from sae_tui.gpu.base import Condition, GpuProcess, GpuSample, samples_of
from sae_tui.gpu.details import GpuDetails
from sae_tui.gpu.history import Recorder
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.sensors import sensors_of
from sae_tui.gpu.simulated import Simulated
from sae_tui.jobs.queue.gpu_reader import GpuReader
from sae_tui.panels.gpu_page import facts
from trainer.contract.paths import DataDir

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
GIB = 1 << 30
MEMORY = {"memory_used_bytes", "memory_free_bytes"}
# Maps each driver fault to the sample fields that become unknown. A negative temperature is valid.
FAULTS = {
    "u32max": {"utilization", "temperature_c", "power_w", "power_limit_w"},
    "mem_max": MEMORY,
    "used_over": MEMORY,
    "total_max": {"memory_total_bytes", "memory_used_bytes"},
    "plim0": {"power_limit_w"},
    "temp_neg": set(),
}
FIELDS = ("utilization", "temperature_c", "power_w", "power_limit_w", "memory_total_bytes", "memory_used_bytes")


def test_an_impossible_value_makes_only_its_own_sensor_unknown(read_all: Callable[..., list[dict[str, Any]]]) -> None:
    *odd, whole = read_all(dict(enumerate(FAULTS)), GPUS=len(FAULTS) + 1)
    assert whole["failed"] == {}
    assert all(whole[field] is not None for field in FIELDS)
    for (fault, expected), sample in zip(FAULTS.items(), odd, strict=True):
        unknown = {field for field in FIELDS if sample[field] is None}
        assert unknown == expected & set(FIELDS), fault
        assert sample["healthy"]
        assert all("impossible value" in sample["failed"][field] for field in unknown)
    assert odd[list(FAULTS).index("temp_neg")]["temperature_c"] == -5


def test_the_queue_and_the_sums_include_the_other_gpus_after_an_impossible_value(drivers: Path, tmp_path: Path) -> None:
    env = environment(drivers, GPUS=4, FAULTS="0:u32max,1:mem_max,2:used_over,3:total_max")
    command = [sys.executable, "-P", "-m", "sae_tui.gpu.read", "nvml"]
    output = subprocess.run(command, env=env, capture_output=True, timeout=60, check=True).stdout
    samples = samples_of(msgspec.json.decode(output, type=list[msgspec.Raw]))
    assert [sample.index for sample in samples] == [0, 1, 2, 3]
    whole = aggregate(samples)
    assert 0 < (whole.total_power_w or 0) < 4 * 10_000
    assert 0 <= (whole.average_utilization or 0) <= 100
    assert whole.hottest is not None
    assert -60 < (whole.hottest.temperature_c or 1000) < 200
    assert whole.counted.memory == 1


def test_a_gpu_that_cannot_be_decoded_does_not_hide_the_others_from_the_queue(tmp_path: Path) -> None:
    source = Simulated(3, faults={})
    rows = [json.loads(msgspec.json.encode(source.sample(index, processes=True))) for index in range(3)]
    rows[1] |= {"index": "one"}
    data = DataDir(tmp_path)
    reader = GpuReader(data, "simulated")
    reader._file.write_text(json.dumps(rows))
    assert [sample.index for sample in reader.samples(60.0)] == [0, 2]


def test_an_impossible_size_does_not_stop_the_recording_of_any_gpu(on_nvml: Callable[..., Any], tmp_path: Path) -> None:
    script = """
import json, sqlite3, sys, time
from pathlib import Path
from sae_tui.gpu.history import Recorder
from sae_tui.gpu.nvml import Nvml
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.sensors import sensors_of
from trainer.contract.paths import DataDir
data = DataDir(Path(%r))
sampler = Sampler(Nvml(), 0.05)
recorder = Recorder(sampler, data, every_s=0.1)
recorder.start()
rows, until = {}, time.monotonic() + 20
while len(rows) < 4 and time.monotonic() < until:
    time.sleep(0.05)
    if data.gpu_db.exists():
        db = sqlite3.connect(data.gpu_db)
        try:
            rows = dict(db.execute("SELECT gpu_index, max(memory_used) FROM gpu_metrics GROUP BY gpu_index"))
        except sqlite3.Error:
            pass
        db.close()
recorder.stop(5); sampler.stop()
print(json.dumps([rows, recorder.problem]))
"""
    rows, problem = on_nvml(script % str(tmp_path / "data"), GPUS=4, FAULTS="1:mem_max,2:u32max")
    assert problem is None
    assert sorted(rows) == ["0", "1", "2", "3"]
    assert rows["1"] is None
    assert rows["0"] > 0


def test_a_recorder_reports_errors_from_its_sources_and_continues(tmp_path: Path, until: Callable[..., Any]) -> None:
    data_dir = DataDir(tmp_path / "data")
    failing = [True]

    def jobs() -> dict[str, int]:
        if failing:
            raise OverflowError("Python int too large to convert to SQLite INTEGER")
        return {}

    sampler = Sampler(Simulated(1), 0.01)
    recorder = Recorder(sampler, data_dir, jobs, every_s=0.02)
    recorder.start()
    until(lambda: recorder.problem and "too large" in recorder.problem)
    failing.clear()
    until(lambda: recorder.problem is None and data_dir.gpu_db.exists() and _n_rows(data_dir) > 10)
    assert recorder.stop(5)
    sampler.stop()


def _n_rows(data_dir: DataDir) -> int:
    with closing(sqlite3.connect(data_dir.gpu_db)) as db:
        try:
            return int(db.execute("SELECT count(*) FROM gpu_metrics").fetchone()[0])
        except sqlite3.Error:
            return 0


LIMITS = {
    name: sensor.limits
    for kind in (GpuSample, Condition, GpuDetails)
    for name, sensor in sensors_of(kind).items()
    if sensor.limits
}
ANY = st.one_of(
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.sampled_from([U32, U64, -1, 1 << 63, True, 10**400, -(10**400)]),
    st.text(max_size=3),
)


@given(st.dictionaries(st.sampled_from(sorted(LIMITS)), ANY, max_size=8))
def test_readings_can_be_stored_and_decoded_for_any_driver_answer(values: dict[str, Any]) -> None:
    for kind, known in (
        (GpuSample, (0, "GPU-a", "H200", 1.0)),
        (Condition, ()),
        (GpuDetails, (1.0,)),
    ):
        names = {name: value for name, value in values.items() if name in kind.__dataclass_fields__}
        reading = kind(*known, **names)
        for name in names:
            kept = getattr(reading, name)
            lowest, highest = LIMITS[name]
            assert kept is None or lowest <= kept <= highest
        if kind is GpuSample:
            numbers = {name: int(value) for name, value in names.items() if isinstance(value, int)}
            whole = GpuSample(0, "GPU-a", "H200", 1.0, **numbers)
            (decoded,) = samples_of([msgspec.Raw(msgspec.json.encode(whole))])
            assert decoded == whole
            used, total = whole.memory_used_bytes, whole.memory_total_bytes
            assert used is None or total is None or used <= total


def test_an_impossible_value_cannot_control_the_terminal() -> None:
    assert GpuSample(0, "GPU-a", "H200", 1.0, utilization="\x1b[2J").failed == {  # type: ignore[arg-type]
        "utilization": "impossible value (�[2J)"
    }


def test_an_impossible_amount_of_process_memory_is_unknown() -> None:
    assert GpuProcess(1, None, None, U64).memory_used_bytes is None
    assert GpuProcess(1, None, None, -1).memory_used_bytes is None
    assert GpuProcess(1, None, None, 80 * GIB).memory_used_bytes == 80 * GIB


def test_the_gpu_page_lists_each_impossible_reading_once() -> None:
    sample = GpuSample(0, "GPU-a", "H200", 1.0, utilization=U32, power_limit_w=0.0)
    details = GpuDetails(1.0, memory_clock_mhz=U32)
    entries = [entry for group in facts(sample, details) for entry in group]
    words = [value for _, value, _ in entries if "impossible" in value]
    assert words == [
        "utilization: impossible value (4294967295)",
        "power limit: impossible value (0)",
        "memory clock: impossible value (4294967295)",
    ]

"""Tests for reloaded drivers, replaced or removed GPUs, and slices created at run time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# This script follows a sampler and prints each distinct state: the UUID of each GPU, whether the GPU can be read, and
# the sampler's problem. The fake driver's faults start and end at fixed times on its clock, `fake_time`. The script
# advances this clock to the next stage only once the sampler has reached the state awaited in the current stage, so
# that no state is missed on a slow machine.
FOLLOW = """
import ctypes, json, time
from sae_tui.gpu import read, sampler as module
from sae_tui.gpu.nvml import Nvml
from sae_tui.gpu.sampler import Sampler
from sae_tui.gpu.several import Several
module.REOPEN_EVERY_S, module._REOPEN_AFTER_S, module.PROCESSES_EVERY_S = 0.3, 0.3, 0.1
read.PROBE_EVERY_S = 0.1
fake_time = ctypes.c_double.in_dll(ctypes.CDLL("libnvidia-ml.so.1"), "fake_time")
fake_time.value = 0.0
stages = {stages}
sampler = Sampler({source}, 0.05)
sampler.start()
pictures, changed, until = [], [], time.monotonic() + 50
while time.monotonic() < until and stages:
    rows = [[one.uuid, one.healthy, one.reason] for one in sampler.latest()]
    problem = str(sampler.problem or "")
    if [rows, problem] not in pictures[-1:]:
        pictures.append([rows, problem])
    are_read = bool(rows) and all(healthy for _, healthy, _ in rows)
    if eval(stages[0][0]):
        changed.append(time.time())
        fake_time.value = stages.pop(0)[1]
    time.sleep(0.02)
rings = [[[reading.timestamp, reading.utilization] for reading in sampler.ring(index).since(None, one.uuid)[0]]
         for index, one in enumerate(sampler.latest())]
print(json.dumps([pictures, rings, changed, len(stages), sampler.stop(2)]))
"""
Run = Callable[..., Any]
Stages = list[tuple[str, float]]
END = 9.0


def follow(
    on_nvml: Run, stages: Stages, source: str = "Nvml()", **options: Any
) -> tuple[list[Any], list[list[list[float | None]]], list[float]]:
    script = FOLLOW.replace("{stages}", repr(stages)).replace("{source}", source)
    pictures, rings, changed, n_left, has_ended = on_nvml(script, PIDS="", **options)
    assert n_left == 0, pictures
    assert has_ended
    return pictures, rings, changed


def test_the_sampler_recovers_when_the_driver_is_reloaded(on_nvml: Run) -> None:
    # While the driver is unloaded, each GPU keeps its row, which shows why the GPU cannot be read.
    away = "'not loaded' in problem and len(rows) == 3 and all('not loaded' in reason for *_, reason in rows)"
    stages = [("are_read", 1.5), (away, 3.0), ("are_read and not problem", END)]
    pictures, _, _ = follow(on_nvml, stages, GPUS=3, FAULTS="*:unload@1-2")
    last, _ = pictures[-1]
    assert [uuid[:12] for uuid, *_ in last] == ["GPU-fa4e0000", "GPU-fa4e0001", "GPU-fa4e0002"]
    between = [rows for rows, problem in pictures if "not loaded" in problem]
    assert all(len(rows) == 3 for rows in between)
    assert not any(healthy for rows in between[-1:] for _, healthy, _ in rows)


def test_a_gpu_that_replaces_another_has_its_own_identity_and_history(on_nvml: Run) -> None:
    first = "are_read and rows[1][0].startswith('GPU-fa4e0001') and len(sampler.ring(1)) > 5"
    stages = [(first, 2.0), ("rows[1][0].startswith('GPU-fa4e0065')", END)]
    _, rings, changed = follow(on_nvml, stages, GPUS=2, FAULTS="1:uuid=100@1")
    assert rings[0][0][0] < changed[0]
    assert rings[1]
    assert all(timestamp > changed[0] for timestamp, _ in rings[1])


def test_a_removed_gpus_row_disappears_and_the_others_are_still_read(on_nvml: Run) -> None:
    stages = [("are_read and len(rows) == 3", 2.0), ("are_read and len(rows) == 2", END)]
    follow(on_nvml, stages, GPUS=3, FAULTS="2:gone@1,0:unload@1-1.1")


@pytest.mark.parametrize(("faults", "n_before", "n_after"), [("0:mig=2@1", 2, 4), ("0:mig=3@0-1", 5, 2)])
def test_slices_created_or_destroyed_at_run_time_are_noticed(
    on_nvml: Run, faults: str, n_before: int, n_after: int
) -> None:
    stages = [(f"are_read and len(rows) == {n}", time) for n, time in ((n_before, 2.0), (n_after, END))]
    pictures, _, _ = follow(on_nvml, stages, GPUS=2, FAULTS=faults)
    rows, problem = pictures[-1]
    assert problem == ""
    assert [uuid[:4] for uuid, *_ in rows] == ["GPU-"] * 2 + ["MIG-"] * (n_after - 2)


@pytest.mark.parametrize("source", ["Nvml()", "Several([Nvml()])"])
def test_a_reset_gpu_comes_back_although_the_open_driver_reports_it_lost(on_nvml: Run, source: str) -> None:
    stages = [("are_read", 1.2), ("[healthy for _, healthy, _ in rows] == [True, False]", 2.0), ("are_read", END)]
    _, rings, _ = follow(on_nvml, stages, source, GPUS=2, FAULTS="1:dropped@1-1.5")
    # The other GPU was read without interruption.
    assert None not in [utilization for _, utilization in rings[0]]


WATCH = """
import ctypes, json, sys
from pathlib import Path
from sae_tui.cli_commands.snapshot import watch
from sae_tui.gpu.nvml import Nvml
from sae_tui.jobs.gpus.occupancy import Occupancy
from trainer.contract.paths import DataDir
fake_time = ctypes.c_double.in_dll(ctypes.CDLL("libnvidia-ml.so.1"), "fake_time")
fake_time.value = 0.0
data = DataDir(Path({folder!r}))
stages = [("healthy", 1.5), ("", 3.0), ("healthy", 9.0)]
seen = []
for snapshot in watch(Nvml(), Occupancy(data), data, 0.01):
    states = {"healthy" if one.healthy else "unread" for one in snapshot.samples}
    seen.append([*states, snapshot.problem])
    if states == ({stages[0][0]} - {""}):
        fake_time.value = stages.pop(0)[1]
    if not stages or len(seen) > 200:
        break
print(json.dumps(seen))
"""


def test_watched_gpus_are_read_again_after_the_driver_is_reloaded(on_nvml: Run, tmp_path: Path) -> None:
    script = WATCH.replace("{folder!r}", repr(str(tmp_path)))
    seen = on_nvml(script, GPUS=2, FAULTS="*:unload@1-2", PIDS="")
    assert seen[0] == seen[-1] == ["healthy", ""]
    assert len(seen) < 200
    assert any("not loaded" in problem for *_, problem in seen)


EXPORT = """
import ctypes, json, time
from sae_tui.cli_commands import exporting
from sae_tui.gpu.nvml import Nvml
from sae_tui.gpu.sampler import Sampler
times_open = ctypes.CDLL("libnvidia-ml.so.1").fake_times_open
sampler = Sampler(Nvml(), 0.05)
gpus = exporting.AskedGpus(sampler, "nvml")
sampler.start()
while not all(one.healthy for one in gpus.samples()) or not gpus.samples():
    time.sleep(0.01)
gpus.rest()
counts = [times_open()]
exporting.REST_AFTER_S = 0.0
gpus.rest()
counts.append(times_open())
began = time.time()
fresh = [one.healthy and one.timestamp >= began for one in gpus.samples()]
counts.append(times_open())
print(json.dumps([counts, fresh, sampler.stop(5), times_open()]))
"""


def test_an_exporter_without_clients_closes_the_driver_and_reopens_it_on_request(on_nvml: Run) -> None:
    assert on_nvml(EXPORT, GPUS=2, PIDS="") == [[1, 0, 1], [True, True], True, 0]


UPDATE = """
import json, os, shutil, time
from pathlib import Path
from sae_tui.gpu import sampler as module
from sae_tui.gpu.nvml import Nvml
from sae_tui.gpu.sampler import Sampler
module.REOPEN_EVERY_S, module._REOPEN_AFTER_S, module.PROCESSES_EVERY_S = 0.3, 0.3, 0.1
drivers, folder = Path({drivers!r}), Path({folder!r})
def install(name):
    shutil.copy(drivers / name / "libnvidia-ml.so.1", folder / "other")
    os.replace(folder / "other", folder / "libnvidia-ml.so.1")
def load(version):
    (folder / "version").write_text(version)
install("old")
load("450.66")
sampler = Sampler(Nvml(), 0.05)
sampler.start()
stages = [
    (lambda: are_read, lambda: load("570.172.08")),
    (lambda: "different versions" in problem, lambda: install("new")),
    (lambda: are_read and not problem, lambda: None),
]
problems, until = [], time.monotonic() + 50
while stages and time.monotonic() < until:
    problem = str(sampler.problem or "")
    problems.append(problem)
    are_read = bool(sampler.latest()) and all(one.healthy for one in sampler.latest())
    if stages[0][0]():
        stages.pop(0)[1]()
    time.sleep(0.02)
print(json.dumps([len(stages), sorted(set(problems)), sampler.source.facts().driver, sampler.stop(5)]))
"""


def test_after_a_driver_update_the_new_library_is_loaded(on_nvml: Run, drivers: Path, tmp_path: Path) -> None:
    script = UPDATE.replace("{drivers!r}", repr(str(drivers))).replace("{folder!r}", repr(str(tmp_path)))
    n_left, problems, driver, has_ended = on_nvml(
        script, driver=str(tmp_path), GPUS=2, PIDS="", MODULE=tmp_path / "version"
    )
    assert (n_left, driver, has_ended) == (0, "570.172.08", True), problems
    assert any("start sae-tui again" in problem for problem in problems)

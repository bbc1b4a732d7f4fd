"""Drivers that are reloaded, GPUs that are exchanged or removed, and slices that are created at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

# Follows a sampler for some seconds and prints each distinct state: the end of each GPU's UUID, whether the GPU can be
# read, and the sampler's problem.
FOLLOW = """
import json, os, time
from sae_tui.gpu import read, sampler as module
from sae_tui.gpu.nvml import Nvml
from sae_tui.gpu.sampler import Sampler
module.REOPEN_EVERY_S, module._REOPEN_AFTER_S, module.PROCESSES_EVERY_S = 0.3, 0.3, 0.1
read.PROBE_EVERY_S = 0.1
sampler = Sampler(Nvml(), 0.05)
sampler.start()
pictures, until = [], time.monotonic() + 30
while time.monotonic() < until and not (pictures and {done}):
    now = [[one.uuid, one.healthy, one.reason] for one in sampler.latest()]
    now = [now, str(sampler.problem or "")]
    if now not in pictures[-1:]:
        pictures.append(now)
    {step}
    time.sleep(0.02)
rings = [[reading.utilization for reading in sampler.ring(index).since(None, one.uuid)[0]]
         for index, one in enumerate(sampler.latest())]
print(json.dumps([pictures, rings, sampler.stop(2)]))
"""
Run = Callable[..., Any]


def follow(on_nvml: Run, done: str, step: str = "pass", **options: Any) -> tuple[list[Any], list[list[float | None]]]:
    pictures, rings, has_ended = on_nvml(FOLLOW.replace("{done}", done).replace("{step}", step), PIDS="", **options)
    assert has_ended
    return pictures, rings


def test_the_sampler_recovers_from_a_reload_of_the_driver(on_nvml: Run) -> None:
    done = "len(pictures) > 2 and not pictures[-1][1] and all(healthy for _, healthy, _ in pictures[-1][0])"
    # The driver cannot be opened until the test has seen this.
    step = """
    if pictures and pictures[-1][0] and pictures[-1][0][0][1] and "FAKE_NVML_INIT_ERROR" not in os.environ:
        os.environ["FAKE_NVML_INIT_ERROR"] = "9"
    if any("not loaded" in problem for _, problem in pictures):
        os.environ["FAKE_NVML_INIT_ERROR"] = "0"
    """
    pictures, _ = follow(on_nvml, done, step, GPUS=3, FAULTS="*:unload@1-1.001")
    last, problem = pictures[-1]
    assert problem == ""
    assert [uuid[:12] for uuid, *_ in last] == ["GPU-fa4e0000", "GPU-fa4e0001", "GPU-fa4e0002"]
    assert all(healthy for _, healthy, _ in last)
    # Meanwhile each GPU keeps its row, which says why it cannot be read. The driver's fault is reported once.
    between = [rows for rows, problem in pictures if "not loaded" in problem]
    assert between
    assert all(len(rows) == 3 and not healthy for rows in between for _, healthy, _ in rows)
    assert all("not loaded" in reason for _, _, reason in between[-1])


def test_an_exchanged_gpu_has_its_own_identity_and_history(on_nvml: Run) -> None:
    done = "pictures[-1][0] and pictures[-1][0][1][0].startswith('GPU-fa4e0065')"
    pictures, rings = follow(on_nvml, done, GPUS=2, FAULTS="1:uuid=100@1")
    assert next(rows[1][0][:12] for rows, _ in pictures if rows and rows[1][1]) == "GPU-fa4e0001"
    assert len(rings[1]) < len(rings[0]) / 2


def test_the_row_of_a_removed_gpu_disappears_and_the_others_are_still_read(on_nvml: Run) -> None:
    done = "len(pictures[-1][0]) == 2 and all(healthy for _, healthy, _ in pictures[-1][0])"
    pictures, _ = follow(on_nvml, done, GPUS=3, FAULTS="2:gone@1,0:unload@1-1.1")
    assert next(len(rows) for rows, _ in pictures if rows) == 3
    assert len(pictures[-1][0]) == 2


@pytest.mark.parametrize(("faults", "n_after"), [("0:mig=2@1", 4), ("0:mig=3@0-1", 2)])
def test_slices_that_are_created_or_destroyed_at_run_time_are_noticed(on_nvml: Run, faults: str, n_after: int) -> None:
    done = (
        f"len(pictures[-1][0]) == {n_after} and all(healthy for _, healthy, _ in pictures[-1][0]) and len(pictures) > 2"
    )
    pictures, _ = follow(on_nvml, done, GPUS=2, FAULTS=faults)
    rows, problem = pictures[-1]
    assert (len(rows), problem) == (n_after, "")
    assert [uuid[:4] for uuid, *_ in rows] == ["GPU-"] * 2 + ["MIG-"] * (n_after - 2)


def test_a_reset_gpu_comes_back_although_the_open_driver_reports_it_lost(on_nvml: Run) -> None:
    done = "len(pictures) > 2 and all(healthy for _, healthy, _ in pictures[-1][0])"
    pictures, rings = follow(on_nvml, done, GPUS=2, FAULTS="1:dropped@1-1.5")
    assert any(not healthy for rows, _ in pictures for _, healthy, _ in rows if rows)
    assert [healthy for _, healthy, _ in pictures[-1][0]] == [True, True]
    # The other GPU was read all the time.
    assert None not in rings[0]

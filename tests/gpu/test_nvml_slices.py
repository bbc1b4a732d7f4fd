"""Tests that MIG slices are treated as separate GPUs, with the real pynvml and a fake version of NVIDIA's library."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

Run = Callable[..., Any]
Read = Callable[..., list[dict[str, Any]]]

FACTS = """
import json
from dataclasses import asdict
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
n = nvml.open()
samples = [nvml.sample(index, processes=True) for index in range(n)]
print(json.dumps([asdict(nvml.facts()), asdict(nvml.details(n - 1, samples[-1])), nvml.buffered(n - 1)]))
"""


def test_slices_are_separate_gpus_listed_after_the_physical_ones(read_all: Read) -> None:
    split, whole, *slices = read_all({0: "mig=3"}, GPUS=2, PIDS="")
    assert [one["index"] for one in slices] == [2, 3, 4]
    assert {one["uuid"][:4] for one in slices} == {"MIG-"}
    assert len({one["uuid"] for one in slices}) == 3
    assert {one["name"] for one in slices} == {"NVIDIA H200 MIG 2g.47gb"}
    assert sum(one["memory_total_bytes"] for one in slices) <= whole["memory_total_bytes"]
    assert all(0 < one["memory_used_bytes"] < one["memory_total_bytes"] for one in slices)
    assert split["name"] == "NVIDIA H200"


def test_measurements_of_a_physical_gpu_are_not_reported_for_its_slices(read_all: Read) -> None:
    split, *slices = read_all({0: "mig"}, GPUS=1, PIDS="")
    for one in slices:
        assert (one["utilization"], one["temperature_c"], one["power_w"]) == (None, None, None)
        assert (one["failed"], one["healthy"], one["unusable"]) == ({}, True, "")
    assert split["temperature_c"] is not None
    # Only the slices report the memory.
    assert split["memory_total_bytes"] is None
    assert split["unusable"].startswith("it is split into MIG slices, which are listed as separate GPUs")


def test_a_slice_is_unusable_if_its_physical_gpu_is_unusable(on_nvml: Run) -> None:
    script = """
import json
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
n = nvml.open()
print(json.dumps([[nvml.sample(index, processes=True).obstacle for _ in range(2)][1] for index in range(n)]))
"""
    faults = ("cmode=2", "pending", "failed_rows", "ecc=7", "xid=79", "idle")
    specs = ",".join(f"{index}:{fault},{index}:mig" for index, fault in enumerate(faults))
    obstacles = on_nvml(script, GPUS=len(faults), FAULTS=specs, PIDS="")
    for position, words in enumerate(("compute mode", "rows of its", "a row of", "7 uncorrected", "Xid 79", "")):
        for obstacle in obstacles[len(faults) + 2 * position :][:2]:
            assert words in obstacle
            assert bool(obstacle) == bool(words)


def test_each_slice_lists_the_processes_running_on_it(read_all: Read) -> None:
    pids = (os.getpid(), os.getppid())
    split, *slices = read_all({0: "mig"}, GPUS=1, PIDS=",".join(map(str, pids)))
    assert [[one["pid"] for one in each["processes"]] for each in slices] == [[pids[0]], [pids[1]]]
    # The physical GPU does not list these processes again, although its driver reports all of them.
    assert split["processes"] == []


def test_a_hanging_gpu_does_not_block_other_gpus_or_their_slices(on_nvml: Run) -> None:
    script = """
import json, os, sys
from sae_tui.gpu import nvml_slices
from sae_tui.gpu.nvml import Nvml
nvml_slices._LIMIT_S = 0.2
nvml = Nvml()
n = nvml.open()
print(json.dumps([n, nvml.sample(3, processes=False).uuid]))
sys.stdout.flush()
os._exit(0)
"""
    n, uuid = on_nvml(script, GPUS=2, FAULTS="0:hang,1:mig", PIDS="")
    assert (n, uuid[:4]) == (4, "MIG-")


def test_a_slice_that_disappears_becomes_an_unreadable_gpu_until_it_returns(on_nvml: Run) -> None:
    script = """
import json, pynvml
from sae_tui.gpu.nvml import Nvml
nvml = Nvml()
nvml.open()
seen = [nvml.sample(1, processes=True)]
look_up = pynvml.nvmlDeviceGetMigDeviceHandleByIndex
def gone(*arguments):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
memory, pynvml.nvmlDeviceGetMemoryInfo = pynvml.nvmlDeviceGetMemoryInfo, gone
pynvml.nvmlDeviceGetMigDeviceHandleByIndex = gone
seen += [nvml.sample(1, processes=True) for _ in range(2)]
pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlDeviceGetMigDeviceHandleByIndex = memory, look_up
seen.append(nvml.sample(1, processes=True))
print(json.dumps([[one.healthy, one.reason] for one in seen]))
"""
    lost = [False, "the driver no longer recognises this GPU"]
    assert on_nvml(script, GPUS=1, FAULTS="0:mig", PIDS="") == [[True, ""], lost, lost, [True, ""]]


def test_slices_have_their_physical_gpus_capability_and_no_links(on_nvml: Run) -> None:
    facts, details, remembered = on_nvml(FACTS, GPUS=2, FAULTS="1:mig", PIDS="")
    assert facts["capabilities"] == [[9, 0]] * 4
    assert facts["nvlinks"] == [18, 18, 0, 0]
    assert [(pair["first"], pair["second"]) for pair in facts["pairs"]] == [(0, 1)]
    assert (details["condition"]["sm_clock_mhz"], remembered) == (None, [])


def test_a_gpu_in_mig_mode_reports_that_it_has_no_slices(on_nvml: Run) -> None:
    script = """
import json, pynvml
from sae_tui.gpu.nvml import Nvml
pynvml.nvmlDeviceGetMaxMigDeviceCount = lambda handle: 0
nvml = Nvml()
n = nvml.open()
sample = nvml.sample(0, processes=True)
print(json.dumps([n, sample.unusable, sample.memory_total_bytes]))
"""
    n, unusable, total = on_nvml(script, GPUS=1, FAULTS="0:mig", PIDS="")
    assert (n, unusable.split(";")[0]) == (1, "MIG is enabled, but the GPU has no slices")
    assert total is not None

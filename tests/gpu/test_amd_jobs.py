"""Tests for commands and jobs on a machine with AMD GPUs. AMD's library is fake, and ranks run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.amd_driver import build_library, environment, module_folder
from support.driver import ROOT

# Every Python process runs this code when it starts. A rank also stores the environment variables that select its GPUs.
START = """
import os, pathlib
from msgspec.structs import replace
from trainer.contract.planning.gpu_vendors import VENDORS
amd = replace(VENDORS["amdsmi"], source="support.amd_cards:OnCpu", driver_files=({here!r},), device="cpu")
VENDORS["amdsmi"] = amd
if os.environ.get("WITH_NVIDIA"):
    VENDORS["nvml"] = replace(VENDORS["nvml"], source="support.cards:Box", driver_files=({here!r},))
if rank := os.environ.get("RANK"):
    seen = {{name: os.environ.get(name) for name in (*amd.pin([]), "CUDA_VISIBLE_DEVICES")}}
    pathlib.Path({here!r}, "rank" + rank).write_text(repr(seen))
"""
JOB = """
[data]
source = "synthetic"
d_in = 8
n_rows = 4096
[sae]
d_sae = 16
k = 4
[train]
batch_size = 64
n_steps = 5
"""
UUIDS = [f"GPU-9f3a5c00d1e2f0a{index}" for index in range(3)]


class Machine:
    """A user's shell on a machine with three AMD GPUs."""

    def __init__(self, root: Path, rocm: Path) -> None:
        (root / "sitecustomize.py").write_text(START.format(here=str(root)))
        own = {"SAE_TUI_DATA_DIR": str(root / "data"), "SAE_TUI_LOCK_DIR": str(root / "locks")}
        self.env = environment(rocm, GPUS=3) | own
        self.env["PYTHONPATH"] = os.pathsep.join([str(root), str(ROOT / "tests"), self.env["PYTHONPATH"]])

    def run(self, *arguments: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "sae_tui", *arguments]
        done = subprocess.run(argv, env=self.env | env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    def json(self, *arguments: str, **env: str) -> Any:
        return json.loads(self.run(*arguments, "--json", **env).stdout)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    if (module := module_folder()) is None:
        pytest.skip("amdsmi is not installed")
    (tmp_path / "rocm").mkdir()
    return Machine(tmp_path, build_library(tmp_path / "rocm", module))


@pytest.mark.slow
def test_ranks_see_only_their_own_gpus_whatever_variables_the_shell_sets(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    shell = {"HIP_VISIBLE_DEVICES": "2,0"}
    rows = machine.json("gpus", **shell)
    assert [(row["index"], row["uuid"]) for row in rows] == [(0, UUIDS[0]), (2, UUIDS[2])]
    launched = machine.json("launch", str(tmp_path / "job.toml"), "--gpus", "0,2", "--wait", **shell)
    job = machine.json("job", str(launched["id"]))
    assert (job["state"], job["gpu_ids"], job["gpu_uuids"]) == ("finished", [0, 2], [UUIDS[0], UUIDS[2]])
    given = {
        "ROCR_VISIBLE_DEVICES": f"{UUIDS[0]},{UUIDS[2]}", "HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": ""
    }  # fmt: skip
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [repr(given)] * 2


def test_gpus_of_both_vendors_are_listed_and_a_job_uses_only_one_vendor(machine: Machine, tmp_path: Path) -> None:
    both = {"WITH_NVIDIA": "1"}
    rows = machine.json("gpus", **both)
    assert [(row["index"], row["name"]) for row in rows] == [
        *enumerate(["NVIDIA H100"] * 2),
        *enumerate(["AMD Instinct MI300X"] * 3, 2),
    ]
    assert len({row["uuid"] for row in rows}) == 5
    chosen = machine.json("gpus", **both, ROCR_VISIBLE_DEVICES="1")
    assert [row["index"] for row in chosen] == [0, 1, 3]
    assert machine.run("select", "-n", "3", **both).stdout == f"{','.join(UUIDS)}\n"
    (tmp_path / "job.toml").write_text(JOB)
    mixed = machine.run("validate", str(tmp_path / "job.toml"), "--gpus", "1,2", code=1, **both)
    assert "GPUs of NVIDIA and AMD cannot share a job" in mixed.stdout + mixed.stderr


def test_missing_software_for_one_vendor_does_not_hide_the_other_vendors_gpus(machine: Machine) -> None:
    rows = machine.json("gpus", WITH_NVIDIA="1", ROCM_PATH="/nowhere")
    assert [row["name"] for row in rows] == ["NVIDIA H100"] * 2
    alone = machine.run("gpus", code=1, ROCM_PATH="/nowhere")
    assert "ROCm's library libamd_smi.so is missing" in alone.stderr

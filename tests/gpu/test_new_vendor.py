"""Tests that a new vendor needs only one file and one line for its GPUs to be supported as fully as NVIDIA's."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support import abacus
from support.cards import Cards
from support.driver import ROOT
from support.tui import wait_until

from sae_tui.app import SaeApp
from sae_tui.doctor.base import CheckedMachine
from sae_tui.doctor.driver import check_driver, check_gpu_count, check_visible
from sae_tui.gpu import load_source
from sae_tui.gpu.base import GpuFacts, GpuPair, SourceUnavailable
from sae_tui.gpu.monitor import Monitor
from sae_tui.gpu.once import read_all
from sae_tui.gpu.several import Several
from sae_tui.gpu.simulated import uuid_of
from sae_tui.gpu.visible import visible
from sae_tui.jobs.gpus.availability import Holders, choices
from sae_tui.jobs.launch import placement
from sae_tui.jobs.queue.gpu_reader import vendor_of
from sae_tui.panels.gpu_picker import GpuPicker
from sae_tui.panels.gpus import GpuPanel
from sae_tui.screens.launch import LaunchScreen
from sae_tui.settings import Settings
from trainer.contract.errors import JobFileError, errors
from trainer.contract.paths import DataDir
from trainer.contract.planning.check_job import check, propose
from trainer.contract.planning.gpu_vendors import VENDORS
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.store.rows import Job

# Every Python process on a machine with abacuses runs this code at startup to register the vendor. A rank also stores
# the environment variables that select its GPUs.
START = """
import os, pathlib, support.abacus
support.abacus.register({folder!r})
{more}
if rank := os.environ.get("RANK"):
    seen = {{name: os.environ.get(name) for name in ("ABACUS_FRAMES", "CUDA_VISIBLE_DEVICES")}}
    pathlib.Path({folder!r}, "rank" + rank).write_text(repr(seen))
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


@pytest.fixture
def frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create two abacuses on this machine and return their folder."""
    folder = tmp_path / "abacuses"
    abacus.hang_up(folder, a={"moved": 4}, b={"warmth": 35})
    monkeypatch.setattr(abacus, "FOLDER", folder)
    monkeypatch.setitem(VENDORS, "abacus", abacus.vendor())
    return folder


class Machine:
    """A user's shell on a machine with abacuses."""

    def __init__(self, root: Path, frames: Path, more: str = "") -> None:
        self.root = root
        (root / "sitecustomize.py").write_text(START.format(folder=str(frames), more=more))
        path = os.pathsep.join(map(str, (root, ROOT / "tests", ROOT)))
        here = {"PYTHONPATH": path, "SAE_TUI_DATA_DIR": str(root / "data"), "SAE_TUI_LOCK_DIR": str(root / "locks")}
        self.env = dict(os.environ) | here

    def run(self, *arguments: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "sae_tui", *arguments]
        done = subprocess.run(argv, env=self.env | env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    def json(self, *arguments: str, **env: str) -> Any:
        return json.loads(self.run(*arguments, "--json", **env).stdout)


def job_on(gpus: object) -> JobConfig:
    raw = {"data": {"source": "synthetic", "d_in": 8}, "sae": {"d_sae": 16, "k": 4}, "launch": {"gpus": gpus}}
    job, problems = parse_job(raw)
    assert job, problems
    return job


def test_the_vendor_with_a_driver_is_chosen_and_nvidia_is_the_default(frames: Path, tmp_path: Path) -> None:
    assert load_source("auto").name == "abacus"
    (frames / "driver").unlink()
    assert load_source("auto").name == "nvml"
    abacus.hang_up(frames)
    nvml = msgspec.structs.replace(VENDORS["nvml"], driver_files=(str(tmp_path),))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VENDORS, "nvml", nvml)
        assert load_source("auto").name == "auto"


def test_commands_list_the_gpus_and_the_environment_variable_hides_some(frames: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path, frames)
    rows = machine.json("gpus")
    assert [(row["index"], row["uuid"], row["memory_used"] >> 30, row["temperature"]) for row in rows] == [
        (0, "ABACUS-frame-a", 4, 31),
        (1, "ABACUS-frame-b", 0, 35),
    ]
    shown = machine.run("gpus", ABACUS_FRAMES="1")
    assert "Abacus Suanpan 13" in shown.stdout
    assert "4.0 GiB" not in shown.stdout
    assert shown.stderr == "sae-tui: 1 of 2 GPUs, by ABACUS_FRAMES\n"
    abacus.hang_up(frames, a={"fault": "jam"})
    assert machine.json("gpus", "0")["reason"] == "a bead is jammed; shake the frame"
    assert [row["uuid"] for row in machine.json("gpus", "--gpu-source", "abacus")] == [row["uuid"] for row in rows]


@pytest.mark.slow
def test_a_rank_sees_only_its_gpu_and_the_gpu_has_a_history(frames: Path, tmp_path: Path) -> None:
    machine = Machine(tmp_path, frames)
    (tmp_path / "job.toml").write_text(JOB)
    launched = machine.json("launch", str(tmp_path / "job.toml"), "--gpus", "1", "--wait")
    job = machine.json("job", str(launched["id"]))
    assert (job["state"], job["gpu_ids"], job["gpu_uuids"]) == ("finished", [1], ["ABACUS-frame-b"])
    assert (frames / "rank0").read_text() == repr({"ABACUS_FRAMES": "ABACUS-frame-b", "CUDA_VISIBLE_DEVICES": ""})
    with closing(sqlite3.connect(DataDir(tmp_path / "data").gpu_db)) as db:
        stored = set(db.execute("SELECT gpu_index, gpu_uuid, memory_used >> 30, job_id FROM gpu_metrics"))
    assert (0, "ABACUS-frame-a", 4, None) in stored
    assert {row for row in stored if row[0] == 1} <= {(1, "ABACUS-frame-b", 0, one) for one in (None, launched["id"])}
    assert machine.json("metrics", "--view", "per_gpu", "--since", "1h")[0]["uuid"] == "ABACUS-frame-a"


async def test_the_screens_show_the_gpus_and_the_form_offers_them(frames: Path, tmp_path: Path) -> None:
    data = DataDir(tmp_path / "data")
    data.create()
    abacus.hang_up(frames, c={"fault": "jam"})
    monitor = Monitor(load_source("auto"), data, dict, interval_s=0.1)
    app = SaeApp(data, monitor, Settings(sampling_interval_s=0.1), ())
    async with app.run_test(size=(99, 45)) as pilot:
        await wait_until(pilot, lambda: "4.0/16.0G" in app.screen.query_one(GpuPanel).plain)
        first, _, jammed = app.screen.query_one(GpuPanel).plain.splitlines()
        assert "0 Suanpan 13" in first
        assert "2 Suanpan 13   ✗ a bead is jammed; shake the frame" in jammed
        await pilot.press("n")
        await wait_until(pilot, lambda: isinstance(app.screen, LaunchScreen) and app.screen.query(GpuPicker))
        picker = app.screen.query_one(GpuPicker)
        await wait_until(pilot, lambda: "Suanpan 13" in picker.plain)
        line = picker.plain.splitlines()[2]
        assert all(word in line for word in ("GPU 1", "Suanpan 13", "16.0 GiB", "available"))
        assert picker.chosen <= {0, 1}
    monitor.stop()


def test_the_doctor_reports_the_driver_and_its_faults(frames: Path, tmp_path: Path) -> None:
    abacus.hang_up(frames, "1.4", c={"fault": "jam"})
    box = CheckedMachine(DataDir(tmp_path), load_source("auto"), environ={"ABACUS_FRAMES": "2,1"}, root=tmp_path)
    version, miscounts = check_driver(box)
    assert (version.level, version.sentence) == ("ok", "Abacus driver 1.4; 2 GPUs")
    assert (miscounts.sentence, miscounts.remedy) == ("driver 1.4 miscounts from 9 on", "install driver 2.0")
    (hidden,) = check_visible(box)
    assert hidden.sentence == "2 of 3 GPUs are visible, because of ABACUS_FRAMES=2,1"
    jammed, readable = check_gpu_count(box)
    assert (jammed.subject, jammed.sentence) == ("GPU 2", "Abacus Suanpan 13: a bead is jammed; shake the frame")
    assert readable.sentence == "1 GPU can be read: Suanpan 13"
    for frame in frames.glob("frame-*"):
        frame.unlink()
    (none,) = check_driver(CheckedMachine(DataDir(tmp_path), load_source("auto"), environ={}, root=tmp_path))
    assert none.sentence.startswith("the abacus driver sees no frames; no GPU was found")


def test_gpus_from_two_vendors_are_listed_and_a_job_uses_gpus_from_only_one(frames: Path, tmp_path: Path) -> None:
    nvidia = "from trainer.contract.planning.gpu_vendors import VENDORS; from msgspec.structs import replace"
    there = f"source='support.cards:Box', driver_files=({str(tmp_path)!r},)"
    stand_in = f"VENDORS['nvml'] = replace(VENDORS['nvml'], {there})"
    machine = Machine(tmp_path, frames, f"{nvidia}; {stand_in}")
    rows = machine.json("gpus")
    assert [(row["index"], row["name"]) for row in rows] == [
        *enumerate(["NVIDIA H100"] * 2),
        *enumerate(["Abacus Suanpan 13"] * 2, 2),
    ]
    hidden = machine.json("gpus", CUDA_VISIBLE_DEVICES="1", ABACUS_FRAMES="0")
    assert [row["index"] for row in hidden] == [1, 2]
    (tmp_path / "job.toml").write_text(JOB)
    mixed = machine.run("validate", str(tmp_path / "job.toml"), "--gpus", "1,2", code=1)
    assert "GPUs of NVIDIA and Abacus cannot share a job" in mixed.stdout + mixed.stderr


def test_a_jobs_vendor_is_the_vendor_of_its_gpus(frames: Path, tmp_path: Path) -> None:
    data, both = DataDir(tmp_path / "data"), Several([Cards(2), load_source("abacus")])
    data.create()
    samples = [both.sample(index, processes=True) for index in range(both.open())]
    (data.root / f"cards-{data.host_word}-auto.json").write_bytes(msgspec.json.encode(samples))
    row = {"name": "job", "config": "", "user": "ann", "host": "box", "device": "cuda"}
    assert vendor_of(data, Job(**row, gpu_source="abacus", gpu_uuids=("ABACUS-frame-a",))) == "abacus"
    assert vendor_of(data, Job(**row, gpu_source="abacus")) == ""
    assert vendor_of(data, Job(**row, gpu_source="simulated:4", gpu_uuids=(uuid_of(0),))) == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(VENDORS, "nvml", msgspec.structs.replace(VENDORS["nvml"], driver_files=(str(tmp_path),)))
        for sample in samples:
            job = Job(**row, gpu_source="auto", gpu_uuids=(sample.uuid,))
            assert vendor_of(data, job) == ("nvml" if sample.index < 2 else "abacus")


def test_facts_about_gpus_from_two_vendors_use_the_combined_indices(frames: Path, tmp_path: Path) -> None:
    facts = GpuFacts("570.1", (12, 8), ((8, 6), (9, 0)), (4, 4), (GpuPair(0, 1, "PIX"),))
    machine = Several([load_source("abacus"), Cards(2, facts)])
    assert machine.open() == 4
    assert machine.facts() == GpuFacts(
        "Abacus 2.1 and NVIDIA 570.1", (12, 8), (None, None, (8, 6), (9, 0)), (0, 0, 4, 4), (GpuPair(2, 3, "PIX"),)
    )
    version, *_ = check_driver(CheckedMachine(DataDir(tmp_path), machine, environ={}, root=tmp_path))
    assert version.sentence == "drivers Abacus 2.1 and NVIDIA 570.1, for CUDA up to 12.8; 4 GPUs"


def test_a_vendor_whose_driver_fails_does_not_hide_another_vendor(frames: Path, tmp_path: Path) -> None:
    for frame in frames.glob("frame-*"):
        frame.unlink()
    machine = Several([load_source("abacus"), Cards(1)])
    assert machine.open() == 1
    assert [fault.sentence for fault in machine.facts().faults] == ["the abacus driver sees no frames"]
    with pytest.raises(SourceUnavailable, match="sees no frames"):
        Several([load_source("abacus")]).open()


def test_a_driver_that_never_answers_does_not_hide_another_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    never, stuck = threading.Event(), Cards(1)
    monkeypatch.setattr(stuck, "open", never.wait)
    monkeypatch.setattr("sae_tui.gpu.several.LIMIT_S", 1.0)
    machine = Several([stuck, Cards(2)])
    assert machine.open() == 2
    (fault,) = machine.facts().faults
    assert fault.sentence == "the GPU driver did not respond within 1 s"
    never.set()


def test_a_gpu_that_does_not_answer_is_attributed_to_its_vendor(frames: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never, gpus = threading.Event(), Cards(2)
    both, sample = Several([gpus, load_source("abacus")]), gpus.sample
    monkeypatch.setattr(gpus, "sample", lambda index, **more: sample(index, **more) if index else never.wait())
    samples = read_all(both, both.open(), limit_s=0.5)
    assert [one.vendor for one in samples] == ["nvml", "nvml", "abacus", "abacus"]
    left = visible(samples, both.name, {"CUDA_VISIBLE_DEVICES": "1", "ABACUS_FRAMES": ""})
    assert [one.index for one in left] == [1]
    never.set()


@pytest.mark.parametrize(("gpus", "device"), [([0, 1], "cuda"), ([2, 3], "cpu"), ([1, 2], None), ("auto:2", None)])
def test_the_review_and_the_launch_reject_a_mix_of_vendors(
    frames: Path, tmp_path: Path, gpus: object, device: str
) -> None:
    both = Several([Cards(2), load_source("abacus")])
    samples = [both.sample(index, processes=True) for index in range(both.open())]
    assert visible(samples, both.name, {"ABACUS_FRAMES": ""}) == tuple(samples[:2])
    here, job = choices(samples, Holders()), job_on(gpus)
    machine = msgspec.structs.replace(placement.machine(here, DataDir(tmp_path), cuda=True), cuda_problem="")
    reasons = [problem.message for problem in errors(check(job, machine))]
    if device:
        assert reasons == []
        assert placement.place(propose(job, machine), here).device == device
        return
    named = "[1]" if gpus == [1, 2] else "[0, 1]"
    reason = f"GPUs of NVIDIA and Abacus cannot share a job; name GPUs from one vendor, as in launch.gpus = {named}"
    assert reasons == [reason]
    with pytest.raises(JobFileError, match="cannot share a job"):
        placement.place(propose(job, machine), here)

"""Tests runs that move between machines which share only a mirror: killed on one, resumed on the next."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from trainer.contract.runs.checkpoint_mirror import read_mirrored, steps_in
from trainer.contract.runs.mirrored_run import fetch
from trainer.contract.runs.resume import data_notes, stored_job, stored_run
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.training.loop import Trainer

N_STEPS = 20


def hang_at_step_12(_: int) -> None:
    """Let a rank stop making progress, so that the test can kill it at a known step."""
    step = Trainer._train_step

    def hang(trainer: Trainer) -> None:
        if trainer.position.step == 12:
            threading.Event().wait()
        step(trainer)

    Trainer._train_step = hang  # type: ignore[method-assign]


def weights_digest(output: Path) -> str:
    return hashlib.sha256((output / "sae_weights.safetensors").read_bytes()).hexdigest()


def mirrored_steps(mirror: Path) -> list[str]:
    return steps_in(str(file.relative_to(mirror)) for file in mirror.rglob("*"))


@pytest.fixture
def job(make_job: Callable[..., JobConfig], tmp_path: Path) -> JobConfig:
    train = {"n_steps": N_STEPS, "checkpoint_every": 5, "mirror_every_minutes": 0, "report_card": False}
    return make_job(train=train | {"mirror_checkpoints": f"file://{tmp_path}/mirror"}, launch={"gpus": "cpu"})


def test_a_killed_run_resumes_from_its_mirror_with_the_bits_of_an_undisturbed_run(
    job: JobConfig, activations: Path, tmp_path: Path, start_ranks: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    alone = start_ranks(job.replace("train", mirror_checkpoints=None), 1, run_dir=tmp_path / "alone")
    assert alone.wait() == [0]
    (tmp_path / "a").mkdir()
    first = start_ranks(job, 1, run_dir=tmp_path / "a" / "run", prepare=hang_at_step_12)
    eventually(lambda: mirrored_steps(tmp_path / "mirror")[:1] == ["step-00000010"])
    first.processes[0].kill()
    assert first.wait() == [-signal.SIGKILL]
    # The first machine and its data are gone; the data on the second is in another folder, and newer.
    activations.rename(tmp_path / "moved")
    for file in (tmp_path / "moved").iterdir():
        os.utime(file, (1, 1))
    shutil.rmtree(tmp_path / "a")
    fetched = fetch(f"file://{tmp_path}/mirror", tmp_path / "b")
    there, run = stored_job(fetched.run_dir, [f"data.path={tmp_path}/moved"]), stored_run(fetched.run_dir)
    assert data_notes(there, run) == []
    spec = msgspec.structs.asdict(run.next_attempt(1, "cpu", ()))
    second = start_ranks(there, 1, run_dir=fetched.run_dir, attempt=2, resume_from=spec["resume_from"])
    assert second.wait() == [0]
    assert weights_digest(fetched.run_dir / "sae") == weights_digest(tmp_path / "alone" / "sae")
    finished = fetch(f"file://{tmp_path}/mirror", tmp_path / "c")
    assert (finished.step, finished.has_sae) == (N_STEPS, True)
    assert weights_digest(finished.run_dir / "sae") == weights_digest(tmp_path / "alone" / "sae")


class Machine:
    """A machine with its own HOME, data folder, working folder and copy of the data; `unshare` hides the others'."""

    def __init__(self, root: Path, name: str, data: Path) -> None:
        self.root = root / name
        self.home, self.cwd = self.root / "home", self.root / "work"
        for folder in (self.home, self.cwd):
            folder.mkdir(parents=True)
        shutil.copytree(data, self.cwd / f"data-{name}")
        self.data, self.run = self.cwd / f"data-{name}", self.cwd / "run"
        here = {"HOME": str(self.home), "SAE_TUI_DATA_DIR": str(self.home / "data"), "OMP_NUM_THREADS": "1"}
        self.env = os.environ | here
        others = [str(path) for path in root.iterdir() if path.is_dir() and path.name not in (name, "mirror")]
        hide = "".join(f"mount -t tmpfs none '{other}'; " for other in others)
        self.prefix = ["unshare", "-m", "sh", "-c", f'{hide}exec "$@"', "sh"] if others and may_unshare() else []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [*self.prefix, sys.executable, "-m", "trainer", *arguments, "--json"]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=self.cwd, env=self.env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def complete(self, *arguments: str) -> dict[str, Any]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return dict(json.loads(out.splitlines()[-1]))

    def die(self, process: subprocess.Popen[str]) -> None:
        """Kill a command and its ranks at once, as if the machine lost its power."""
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def may_unshare() -> bool:
    return (
        bool(shutil.which("unshare")) and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1, 2, 1), (2, 2, 2)], ids=str)
def test_a_run_moves_across_three_machines_that_are_killed(
    job: JobConfig, activations: Path, tmp_path: Path, eventually: Callable[..., None], ranks: tuple[int, int, int]
) -> None:
    root, mirror = tmp_path / "world", tmp_path / "world" / "mirror"
    root.mkdir()
    job = job.replace("train", mirror_checkpoints=f"file://{mirror}", n_steps=1200, checkpoint_every=50)
    # Otherwise, the mode and the shares of the ranks depend on the measured speeds.
    job = job.replace("train", deterministic=True).replace("parallel", mode="auto" if 1 in ranks else "ddp")
    file = tmp_path / "job.toml"
    file.write_text(dump_job(job))
    alone = Machine(root, "alone", activations)
    whole = alone.complete(
        "run", str(file), "--out", str(alone.run), "--set", "train.mirror_checkpoints=", "--set",
        f"launch.gpus=cpu:{ranks[0]}",
    )  # fmt: skip
    reached = [0]
    for name, n_ranks in zip("abc", ranks, strict=True):
        machine = Machine(root, name, activations)
        settings = ["--set", f"data.path={machine.data}", "--set", f"launch.gpus=cpu:{n_ranks}"]
        source = ["run", str(file)] if name == "a" else ["resume", f"file://{mirror}"]
        process = machine.start(*source, "--out", str(machine.run), *settings)
        if name == "c":
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            break

        def has_moved_on(run: Path = machine.run) -> bool:
            """Return whether this machine has itself mirrored a checkpoint."""
            mirrored = read_mirrored(run)
            return mirrored is not None and (mirrored.step or 0) >= reached[-1] + 100

        eventually(has_moved_on, 300)
        machine.die(process)
        reached.append(int(mirrored_steps(mirror)[0].removeprefix("step-")))
        assert reached[-2] < reached[-1] < 1200
    answer = json.loads(out.splitlines()[-1])
    assert (answer["state"], answer["steps"]) == ("finished", 1200)
    outputs = Path(answer["output_path"]), Path(whole["output_path"])
    print(f"ranks {ranks}, killed after {reached[1:]}:", *map(weights_digest, outputs))
    if len(set(ranks)) == 1:
        assert weights_digest(outputs[0]) == weights_digest(outputs[1])
    else:
        assert answer["heldout_fvu"] == pytest.approx(whole["heldout_fvu"], rel=0.02)
    assert (
        load_file(outputs[0] / "sae_weights.safetensors").keys()
        == load_file(outputs[1] / "sae_weights.safetensors").keys()
    )

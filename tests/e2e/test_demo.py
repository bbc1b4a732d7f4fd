"""The whole product as a person uses it: a real terminal, real keys, a real training by two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.terminal import Terminal

ROOT = Path(__file__).parents[2]
JOB = """
name = "e2e"
[data]
path = "{root}/data/sample"
[sae]
d_sae = 768
k = 16
[train]
batch_size = 512
n_steps = {steps}
log_every = 5
"""


class Box:
    """One user's data folder, the app in a terminal, and the shell commands on the same folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"SAE_TUI_DATA_DIR": str(folder / "data")}
        self.terminals: list[Terminal] = []

    def app(self, columns: int = 120, rows: int = 40) -> Terminal:
        argv = [sys.executable, "-m", "sae_tui", "--demo"]
        terminal = Terminal(argv, columns=columns, rows=rows, env=self.env)
        self.terminals.append(terminal)
        terminal.wait_for("RTX 3080", 60)
        return terminal

    def shell(self, *arguments: str) -> dict:
        argv = [sys.executable, "-m", "sae_tui", "--demo", *arguments, "--json"]
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait_for_state(self, job_id: int, *states: str, seconds: float = 120) -> dict:
        deadline = time.monotonic() + seconds
        while True:
            job = self.shell("job", str(job_id))
            if job["state"] in states:
                return job
            assert time.monotonic() < deadline, job
            time.sleep(0.2)

    def job_file(self, steps: int) -> Path:
        path = self.folder / "job.toml"
        path.write_text(JOB.format(root=ROOT, steps=steps))
        return path

    def launch_by_keys(self, terminal: Terminal, steps: int) -> None:
        """Launch screen, job file, two of the three free cards."""
        terminal.send("n")
        terminal.wait_for("Review")
        terminal.send("\x0f")  # ctrl+o
        terminal.wait_for("Job file to open")
        terminal.send(f"{self.job_file(steps)}\r")
        terminal.wait_for("e2e")
        terminal.wait_for("3 GPUs, ")
        terminal.send("\x1b[B\x1b[B ")  # down, down, space: leaves GPU 2
        terminal.wait_for("2 GPUs, ")
        terminal.send("\x0c")  # ctrl+l
        if steps > 1000:
            terminal.wait_for("Launch all the same?")
            terminal.send("y")


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    made = Box(tmp_path)
    yield made
    for terminal in made.terminals:
        terminal.close()
    for pid in processes_of(tmp_path):
        os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> list[int]:
    """Every process that names the folder in its command line: supervisors and ranks do, the app does not."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


@pytest.mark.timeout(400)
def test_a_job_launched_by_keys_outlives_the_app_and_leaves_an_sae_that_saelens_loads(box: Box) -> None:
    terminal = box.app()
    box.launch_by_keys(terminal, steps=120)
    terminal.wait_for("▶ running", 90)
    terminal.send("q")
    assert terminal.wait_for_exit() == 0

    job = box.wait_for_state(1, "finished", "failed", seconds=240)
    assert job["state"] == "finished", job
    assert job["gpu_ids"] == [0, 1]
    assert job["world_size"] == 2
    assert job["step"] == 120

    again = box.app()
    again.wait_for("✓ finished")
    again.send("\r")
    again.wait_for(lambda text: "FVU" in text and "dead fraction" in text and "own ms" in text)
    assert_saelens_loads(Path(job["output_path"]))
    assert processes_of(box.folder / "data") == []


@pytest.mark.timeout(400)
def test_killing_the_app_and_closing_the_terminal_leave_the_job_running_and_stop_saves_it(box: Box) -> None:
    killed = box.app(80, 24)
    box.launch_by_keys(killed, steps=100_000)
    killed.wait_for("▶ running", 90)
    killed.process.kill()
    closed = box.app(80, 24)
    closed.wait_for("▶ running")
    before = box.shell("job", "1")["step"]
    closed.close()

    last = box.app()
    last.wait_for("▶ running")
    deadline = time.monotonic() + 60
    while box.shell("job", "1")["step"] <= before:
        assert time.monotonic() < deadline
    last.send("s")
    last.wait_for("Stop job 1")
    last.send("y")
    last.wait_for("◼ stopped", 60)
    job = box.shell("job", "1")
    assert job["error"] is None
    checkpoints = list((box.folder / "data").rglob("checkpoints/*/manifest.json"))
    assert checkpoints
    assert box.shell("gpus", "0")["current_job"] is None
    assert processes_of(box.folder / "data") == []


def assert_saelens_loads(folder: Path) -> None:
    import torch
    from sae_lens import SAE
    from safetensors.torch import load_file

    sae = SAE.load_from_disk(folder)
    weights = load_file(folder / "sae_weights.safetensors")
    x = load_file(ROOT / "data/sample/acts-00000.safetensors")["activations"][:256].float()
    pre_acts = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
    top = pre_acts.topk(16)
    acts = torch.zeros_like(pre_acts).scatter(1, top.indices, top.values.relu())
    x_hat = acts @ weights["W_dec"] + weights["b_dec"]
    assert (sae(x) - x_hat).abs().max() < 1e-4
    assert (x - x_hat).pow(2).sum() < 0.6 * (x - x.mean(0)).pow(2).sum()

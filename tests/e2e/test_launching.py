"""Tests for launching jobs in a real terminal: a job that can never run is rejected, and a job that must wait needs
confirmation.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.box import CTRL_L, ROOT, Box
from support.driver import environment

from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.wording import gibibytes

HOME, DOWN = "\x1b[H", "\x1b[B"
# An SAE with 1.2 million latents does not fit on a GPU with 10 GiB, and its checkpoints need 35 GiB on disk.
WIDE = """
name = "wide"
[data]
path = "{root}/data/sample"
[sae]
d_sae = {d_sae}
k = 32
[train]
batch_size = 1024
n_tokens = 60000
keep_checkpoints = 1
[parallel]
mode = "{mode}"
[launch]
gpus = {gpus}
"""


def job_file(box: Box, name: str, d_sae: int, gpus: str, mode: str = "auto") -> Path:
    path = box.folder / f"{name}.toml"
    path.write_text(WIDE.format(root=ROOT, d_sae=d_sae, gpus=gpus, mode=mode))
    return path


def open_file(terminal, path: Path, shows: str) -> str:
    terminal.send("\x0f")
    terminal.wait_for("Job file to open")
    terminal.send(f"{path}\r")
    return terminal.wait_for(shows)


def type_setting(terminal, name: str, value: str) -> None:
    """Find a setting in the form by name and replace its value."""
    terminal.send("\x06")  # ctrl+f
    terminal.wait_for("Find a setting")
    terminal.send(f"{name}\r")
    terminal.wait_for(lambda screen: "Find a setting" not in screen)
    terminal.send(f"\x15{value}")  # ctrl+u


def one_line(screen: str) -> str:
    return " ".join(screen.split())


def asked_in(screen: str) -> str:
    """Return the text of the topmost dialog."""
    rows = [row for row in screen.splitlines() if "│" in row]
    asking = next(row for row in rows if "?" in row)
    left = asking.rfind("│", 0, asking.index("?"))
    right = asking.index("│", asking.index("?"))
    return one_line(
        " ".join(row[left + 1 : right] for row in rows if row[left : left + 1] == row[right : right + 1] == "│")
    )


def recorded(box: Box) -> list[Job]:
    if not box.data.control_db.exists():
        return []
    with contextlib.closing(Control(box.data.control_db, readonly=True)) as control:
        return control.jobs()


def told_need(screen: str) -> str:
    """Return the memory per GPU that the job needs according to the review."""
    found = re.search(r"needs ([\d.]+ GiB) per GPU", one_line(screen))
    assert found, screen
    return found[1]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_job_that_can_never_run_is_rejected_and_auto_selects_a_mode_that_fits(box: Box) -> None:
    terminal = box.app(120, 40)
    terminal.press("n")
    terminal.wait_for("needs 0.9 GiB per GPU")
    open_file(terminal, job_file(box, "never", 1_200_000, "[0, 1, 2]", "ddp"), "sae.d_sae: needs ")
    refusal = r"needs [\d.]+ GiB on each of 3 GPUs, and GPU 2 has 10\.0 GiB in total; it fits with"
    assert re.search(refusal, one_line(terminal.text))
    terminal.send(CTRL_L)
    terminal.wait_for("Not launched")
    assert recorded(box) == []

    open_file(terminal, job_file(box, "auto", 1_200_000, "[0, 1, 2]"), "3 GPUs, tensor")
    terminal.wait_for(" of 9.1 GiB free on GPU 2")
    needed = told_need(terminal.text)
    assert f"✓ {needed} of 9.1 GiB free on GPU 2" in one_line(terminal.text)
    terminal.send(CTRL_L)
    terminal.wait_for("Job 1")
    (job,) = recorded(box)
    assert job.mode == "tensor"
    assert gibibytes(job.card_memory_bytes) == needed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_width_typed_into_the_form_makes_auto_select_a_mode_that_fits(box: Box) -> None:
    terminal = box.app(120, 40)
    terminal.press("n")
    terminal.wait_for("needs 0.9 GiB per GPU")
    type_setting(terminal, "keep_checkpoints", "1")
    type_setting(terminal, "d_sae", "1200000")
    terminal.wait_for("3 GPUs, tensor")
    assert told_need(terminal.text)
    terminal.send(CTRL_L)
    terminal.wait_for("Job 1")
    (job,) = recorded(box)
    assert job.mode == "tensor"
    assert job.waits_for is None or "free of" not in job.waits_for


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_the_confirmation_for_a_job_that_must_wait_says_how_much_memory_it_needs(box: Box) -> None:
    terminal = box.app(120, 40)
    terminal.press("n")
    terminal.wait_for("needs 0.9 GiB")
    open_file(terminal, job_file(box, "later", 600_000, "[1]"), "1 GPU, single")
    terminal.press(HOME, DOWN, DOWN, DOWN, " ")
    terminal.wait_for("Choose it anyway?")
    terminal.send("y")
    shown = terminal.wait_for("2 GPUs, ")
    shown = terminal.wait_for("GPU 3 has 2.1 GiB free of ")
    assert "used by mallory (pid 31415, python train.py)" in one_line(shown)
    lack = re.search(r"GPU 3 has 2.1 GiB free of [0-9.]+ GiB needed", one_line(shown))[0]

    terminal.send(CTRL_L)
    asked = terminal.wait_for("until it is free?")
    assert f"{lack}. Launch, and wait until it is free?" in asked_in(asked)
    terminal.send("n")
    terminal.wait_for(lambda screen: "until it is free?" not in screen)
    assert recorded(box) == []
    terminal.send(CTRL_L)
    terminal.wait_for("until it is free?")
    terminal.send("y")
    terminal.wait_for("queued")
    (job,) = recorded(box)
    assert f" of {gibibytes(job.card_memory_bytes)} needed" in lack


@pytest.mark.timeout(300)
def test_a_torch_build_without_cuda_is_reported_before_the_launch(box: Box, drivers: Path) -> None:
    torch = box.folder / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text(
        "__version__ = '2.9.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
    )
    env = environment(drivers, GPUS=2)
    env["PYTHONPATH"] = f"{torch.parent}{os.pathsep}{env['PYTHONPATH']}"
    path = job_file(box, "small", 3072, "[0]")
    argv = [sys.executable, "-m", "sae_tui", "--gpu-source", "nvml", "validate", str(path)]
    done = subprocess.run(argv, env=box.env | env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "launch.gpus: PyTorch 2.9.0+cpu is built without CUDA, so no job can use the GPUs" in done.stdout

    terminal = box.app(120, 40, "--gpu-source", "nvml", shows="H200", **env)
    terminal.press("n")
    terminal.wait_for("built without CUDA")
    terminal.send(CTRL_L)
    terminal.wait_for("Not launched")

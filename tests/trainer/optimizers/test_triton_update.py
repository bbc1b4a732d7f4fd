"""The kernels in another process, since Triton's interpreter has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.optimizers import row_adam

ROOT = Path(__file__).parents[3]
CASES = Path(__file__).with_name("update_cases.py")


def test_the_kernels_agree_with_float64_and_with_whole_passes() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or "100%" in done.stdout


def test_a_machine_where_triton_fails_is_told_so_and_goes_without() -> None:
    # There is nothing to run a kernel on but this CPU.
    with pytest.warns(UserWarning, match="steps on cpu go without Triton"):
        assert row_adam._working_kernels(torch.device("cpu")) is None


def test_a_cpu_goes_without_triton() -> None:
    assert row_adam.kernels_for(torch.zeros(1)) is None

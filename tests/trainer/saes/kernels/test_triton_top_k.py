"""The kernels in another process, since Triton's interpreter has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.runtime.triton_kernels import working_kernels
from trainer.saes.kernels import top_k

ROOT = Path(__file__).parents[4]
CASES = Path(__file__).with_name("top_k_cases.py")


def test_the_kernels_agree_with_a_full_sort_in_float64() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or "100%" in done.stdout


def test_a_machine_where_triton_fails_is_told_so_and_goes_without() -> None:
    # There is nothing to run a kernel on but this CPU. It is told once.
    working_kernels.cache_clear()
    with pytest.warns(UserWarning, match="choices of latents on cpu go without Triton"):
        assert top_k._working_triton(torch.device("cpu")) is None


def test_a_cpu_goes_without_triton() -> None:
    assert top_k.triton_for(torch.zeros(1)) is None

"""Runs Triton kernel cases in another process, since the interpreter must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.box import ROOT


def run_cases(cases: Path, *, on_cpu: bool = False, compiles: bool = False, among: str = "") -> None:
    """Assert that all cases in a file pass: on a GPU if there is one and not `on_cpu`, else in the interpreter.

    With `compiles`, the cases are only compiled, which needs neither a GPU nor the interpreter. `among` selects cases
    by marker, like pytest's -m.
    """
    pytest.importorskip("triton")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    if not compiles and (on_cpu or not torch.cuda.is_available()):
        environment["TRITON_INTERPRET"] = "1"
    plugins = [word for name in ("no:xdist", "no:cacheprovider", "support.programs") for word in ("-p", name)]
    command = [sys.executable, "-m", "pytest", *plugins, "-m", among, str(cases)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or "100%" in done.stdout

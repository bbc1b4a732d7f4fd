"""Runs Triton kernel tests in a separate process, because TRITON_INTERPRET must be set before Triton is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import torch
from support.box import ROOT
from support.forked import in_loaded_process

# Run the fast and the slow cases of a file as two tests.
in_two_shares = pytest.mark.parametrize("among", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])


def run_cases(cases: Path, *, on_cpu: bool = False, compiles: bool = False, among: str = "not slow") -> None:
    """Assert that all cases in a file pass, on a GPU if there is one and `on_cpu` is not set, else in the interpreter.

    With `compiles`, the cases are only compiled, which needs neither a GPU nor the interpreter. `among` selects cases
    by marker, like pytest's -m.
    """
    pytest.importorskip("triton")
    # Importing pytest's plugins, which the cases do not use, would take a core-second.
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {})
    if not compiles and (on_cpu or not torch.cuda.is_available()):
        environment["TRITON_INTERPRET"] = "1"
    code, output = in_loaded_process(_run, environment, str(cases), among)
    assert code == 0, output


def _run(environment: dict[str, str], cases: str, among: str) -> tuple[int, str]:
    """Return pytest's exit code and output for a file of cases. Exit code 5 means that no case was selected."""
    assert "triton" not in sys.modules
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    plugins = [
        word for name in ("no:unraisableexception", "no:cacheprovider", "support.programs") for word in ("-p", name)
    ]
    with TemporaryFile("w+") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
        code = pytest.main([*plugins, "-m", among, cases])
        file.seek(0)
        return int(code), file.read()

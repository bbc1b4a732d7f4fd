"""Tests for determining which build of PyTorch is installed, without importing it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from sae_tui.jobs.launch.pytorch import cuda_problem
from trainer.contract.planning.torch_build import Build

ASK = "from sae_tui.jobs.launch.pytorch import cuda_problem; print(cuda_problem()); assert 'torch' not in sys.modules"
BUILT = "__version__ = '2.9.0+{}'\ncuda: Optional[str] = {}\nhip: Optional[str] = {}\n"


@pytest.mark.parametrize(
    ("version_file", "tells"),
    [
        (BUILT.format("cpu", None, None), True),
        (BUILT.format("cu128", "'12.8'", None), False),
        (BUILT.format("rocm6.4", None, "'6.4'"), False),
        ("__version__ = '2.9.0'\n", False),
        (None, False),
    ],
)
def test_only_a_build_without_cuda_is_reported_as_such(tmp_path, version_file, tells) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    if version_file is not None:
        (tmp_path / "torch" / "version.py").write_text(version_file)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {ASK}"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert bool(output) == tells
    assert not tells or output.startswith("PyTorch 2.9.0+cpu is built without CUDA, so no job can use the GPUs; ")


def test_a_build_for_another_vendors_gpus_is_reported_with_a_remedy(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sae_tui.jobs.launch.pytorch.installed_build", lambda: Build("2.9.0+cu128", "cuda"))
    assert cuda_problem({"nvml"}) == cuda_problem({"nvml", "amdsmi"}) == ""
    assert cuda_problem({"amdsmi"}) == (
        "PyTorch 2.9.0+cu128 is built for CUDA, so no job can use the AMD GPUs; install a build of torch for "
        'ROCm; pytorch.org/get-started shows the command, or choose "cpu"'
    )

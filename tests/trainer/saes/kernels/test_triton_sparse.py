"""The Triton kernels in another process, since Triton's interpreter has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from trainer.saes.kernels import sparse

ROOT = Path(__file__).parents[4]
CASES = Path(__file__).with_name("triton_cases.py")


@pytest.fixture
def kernels() -> ModuleType:
    pytest.importorskip("triton")
    from trainer.saes.kernels import triton_sparse

    return triton_sparse


def test_the_kernels_agree_with_dense_products_in_float64(kernels: ModuleType) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout or "100%" in done.stdout


@pytest.mark.parametrize(("capability", "element"), [(80, "fp32"), (90, "bf16")])
@pytest.mark.parametrize("name", ["_sum_bags", "_add_rest", "_multiply_rows"])
def test_every_kernel_compiles_for_a_gpu(
    name: str, capability: int, element: str, kernels: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter accepts more than the compiler does, which needs no GPU.
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(kernels, name)
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys({"out", "values", "dense"} & types.keys(), "*fp32")
    types |= dict.fromkeys({"indices", "starts", "bags", "n_filled"} & types.keys(), "*i64")
    types |= {"rows": f"*{element}", "ENTRIES": "constexpr", "COLUMNS": "constexpr"}
    options: dict[str, Any] = kernels._tile(32, 768)
    constants = {key: options.pop(key) for key in ("ENTRIES", "COLUMNS")}
    source = compiler.ASTSource(kernel, types, constants)
    compiled = compiler.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]


def test_a_machine_where_triton_fails_is_told_so_and_goes_without() -> None:
    # There is nothing to run a kernel on but this CPU.
    with pytest.warns(UserWarning, match="go without Triton"):
        assert sparse._working_triton(torch.device("cpu")) is None


def test_a_cpu_and_float64_go_without_triton() -> None:
    assert sparse.triton_for(torch.zeros(1)) is None
    if torch.cuda.is_available():
        assert sparse.triton_for(torch.zeros(1, dtype=torch.float64, device="cuda")) is None

"""Machines on which Triton cannot run a kernel: users of kernels are told so, and go without."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trainer.metrics import interval
from trainer.optimizers import row_adam
from trainer.runtime import triton_kernels
from trainer.runtime.triton_kernels import working_kernels
from trainer.saes import losses
from trainer.saes.kernels import dead_latents, encode, silence, sparse, top_k
from trainer.training import gradients


@pytest.mark.parametrize(
    ("kernels_of", "purpose"),
    [
        (partial(sparse._working_triton, dtype=torch.bfloat16), "sparse products in bfloat16"),
        (top_k._working_triton, "choices of latents"),
        (partial(dead_latents._working_triton, dtype=torch.float16), "weights of dead latents in float16"),
        (losses._working_triton, "errors of reconstructions"),
        (silence._working_triton, "counts of silent latents"),
        (gradients._working_triton, "scales of gradients"),
        (interval._working_triton, "sums of metrics"),
        (partial(encode._working_triton, dtype=torch.float16), "what encoders read in float16"),
        (row_adam._working_kernels, "steps"),
    ],
)
def test_a_machine_where_triton_fails_is_told_so_and_goes_without(
    kernels_of: Callable[[torch.device], ModuleType | None], purpose: str
) -> None:
    # There is nothing to run a kernel on but this CPU. It is told once.
    working_kernels.cache_clear()
    with pytest.warns(UserWarning, match=f"{purpose} on cpu go without Triton"):
        assert kernels_of(torch.device("cpu")) is None


def test_a_trial_that_runs_out_of_memory_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [False, True]

    def try_out(device: torch.device) -> None:
        if not free.pop(0):
            raise torch.OutOfMemoryError("CUDA out of memory")

    module = ModuleType("some_kernels")
    module.try_out = try_out  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_kernels", module)
    with pytest.raises(torch.OutOfMemoryError):
        working_kernels("some_kernels", "some steps", torch.device("cpu"))
    assert working_kernels("some_kernels", "some steps", torch.device("cpu")) is module


@pytest.mark.parametrize(("n_failures", "works"), [(1, True), (2, False)])
def test_a_cache_that_another_process_changes_is_tried_once_more(
    n_failures: int, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(16, "Device or resource busy"), FileNotFoundError(2, "gone")][:n_failures]

    def try_out(device: torch.device) -> None:
        if failures:
            raise failures.pop()

    module = ModuleType(f"kernels_of_{n_failures}")
    module.try_out = try_out  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(triton_kernels, "RETRY_S", 0.0)
    with contextlib.nullcontext() if works else pytest.warns(UserWarning, match="go without Triton"):
        found = working_kernels(module.__name__, "some steps", torch.device("cpu"))
    assert found is (module if works else None)


def kernels_of(module: Path) -> Iterator[ast.FunctionDef]:
    for one in ast.parse(module.read_text()).body:
        if isinstance(one, ast.FunctionDef) and any(ast.unparse(by) == "triton.jit" for by in one.decorator_list):
            yield one


def test_no_kernel_asks_for_a_tensor_and_something_else_at_once() -> None:
    # Triton 3.2, which comes with PyTorch 2.6, compiles what depends on both, and fails where there is no tensor.
    modules = sorted(Path(sparse.__file__).parents[2].rglob("triton_*.py"))
    kernels = [(module, kernel) for module in modules for kernel in kernels_of(module)]
    assert len(kernels) > 20
    asks = [
        f"{module.name}: {ast.unparse(one.test)}"
        for module, kernel in kernels
        for one in ast.walk(kernel)
        if isinstance(one, ast.If | ast.IfExp) and isinstance(one.test, ast.BoolOp) and "None" in ast.unparse(one.test)
    ]
    assert asks == []

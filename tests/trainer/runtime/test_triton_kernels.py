"""Machines on which Triton cannot run a kernel: users of kernels warn, and work without Triton."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.interpreted import run_cases

from trainer.metrics import interval
from trainer.optimizers import row_adam
from trainer.runtime import triton_kernels
from trainer.runtime.triton_kernels import working_kernels
from trainer.saes import losses
from trainer.saes.kernels import dead_latents, encode, since_fired, sparse, top_k
from trainer.training import gradients

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("kernels_of", "purpose"),
    [
        (partial(sparse._working_triton, dtype=torch.bfloat16), "sparse products in bfloat16"),
        (top_k._working_triton, "latent selections"),
        (partial(dead_latents._working_triton, dtype=torch.float16), "dead latents' weights in float16"),
        (losses._working_triton, "reconstruction errors"),
        (since_fired._working_triton, "tokens since fired"),
        (gradients._working_triton, "gradient scales"),
        (interval._working_triton, "metric sums"),
        (partial(encode._working_triton, dtype=torch.float16), "encoder inputs in float16"),
        (row_adam._working_kernels, "steps"),
    ],
)
def test_if_triton_fails_a_warning_is_given_and_it_is_not_used(
    kernels_of: Callable[[torch.device], ModuleType | None], purpose: str
) -> None:
    # No kernel can run on this CPU. The warning appears once.
    triton_kernels.forget()
    with pytest.warns(UserWarning, match=f"{purpose} on cpu run without Triton"):
        assert kernels_of(torch.device("cpu")) is None


Trials = Callable[..., str]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trials]:
    """Return a function that adds a kernel module whose trials raise the given errors, one after the other."""
    monkeypatch.setattr(triton_kernels, "MODULES", {})
    monkeypatch.setattr(triton_kernels, "RETRY_S", 0.0)
    triton_kernels.forget()

    def add(name: str, *errors: Exception) -> str:
        left, module = list(errors), ModuleType(name)

        def try_out(device: torch.device) -> None:
            if left:
                raise left.pop(0)

        module.try_out = try_out  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        triton_kernels.MODULES[name] = triton_kernels.Kernels(f"steps of {name}")
        return name

    yield add
    triton_kernels.forget()


def test_a_trial_that_runs_out_of_memory_is_repeated(kernels: Trials) -> None:
    name = kernels("some_kernels", torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        working_kernels(name, CPU)
    assert working_kernels(name, CPU) is sys.modules[name]


def test_a_trial_is_repeated_once_if_another_process_changes_the_cache(kernels: Trials) -> None:
    busy, gone = OSError(16, "Device or resource busy"), FileNotFoundError(2, "gone")
    once, twice = kernels("once", busy), kernels("twice", busy, gone)
    assert working_kernels(once, CPU) is sys.modules[once]
    with pytest.warns(UserWarning, match="steps of twice on cpu run without Triton"):
        assert working_kernels(twice, CPU) is None


def test_all_kernels_are_tried_and_withheld_ones_are_not_used(kernels: Trials) -> None:
    names = [kernels("fine"), kernels("broken", RuntimeError("no compiler\nin /usr/bin")), kernels("others_lack")]
    with pytest.warns(UserWarning, match="steps of broken"):
        failures = triton_kernels.try_all(CPU, torch.bfloat16, names)
    assert failures == {"broken": "no compiler"}
    triton_kernels.withhold(["others_lack"])
    assert [working_kernels(name, CPU) is not None for name in names] == [True, False, False]


def test_each_kernel_is_reported_before_triton_compiles_it() -> None:
    run_cases(Path(__file__).with_name("compiling_cases.py"), compiles=True)


def test_the_reported_number_of_kernels_equals_the_number_in_the_trials() -> None:
    run_cases(Path(__file__).with_name("kernel_count_cases.py"), on_cpu=True)


def kernels_of(module: Path) -> Iterator[ast.FunctionDef]:
    for one in ast.parse(module.read_text()).body:
        if isinstance(one, ast.FunctionDef) and any(ast.unparse(by) == "triton.jit" for by in one.decorator_list):
            yield one


def test_no_kernel_combines_a_check_for_none_with_another_condition() -> None:
    # Triton 3.2 (PyTorch 2.6) compiles a branch with such a condition even if the tensor is None, and fails.
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

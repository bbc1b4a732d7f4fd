"""Tests that if Triton cannot run a kernel, the kernel is not used and a warning is issued."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.interpreted import run_cases

import trainer
from trainer.runtime import triton_kernels
from trainer.runtime.triton_kernels import COMPILED_UPDATES, KERNELS, Kernels

CPU = torch.device("cpu")
OF_TRITON = [one for one in KERNELS.values() if one != COMPILED_UPDATES]


@pytest.mark.parametrize("kernels", OF_TRITON, ids=lambda one: one.purpose)
def test_if_triton_fails_a_warning_is_issued_and_no_kernel_is_used(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Kernels cannot run on this CPU. The warning is issued only once.
    triton_kernels.forget()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    purpose = f"{kernels.purpose} in float16" if kernels.by_dtype else kernels.purpose
    with pytest.warns(UserWarning, match=f"{purpose} on cpu run without Triton"):
        assert kernels.on(torch.zeros(1), torch.float16) is None


def test_no_kernel_is_tried_on_a_cpu_and_no_dtype_dependent_kernel_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton_kernels.forget()
    assert [one.on(torch.zeros(1)) for one in OF_TRITON] == [None] * len(OF_TRITON)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    by_dtype = [one for one in OF_TRITON if one.by_dtype]
    assert by_dtype
    for one in by_dtype:
        assert one.on(torch.zeros(1, dtype=torch.float64)) is None
        assert one.on(torch.zeros(1), torch.float64) is None
    assert not triton_kernels._tried.cache_info().currsize


Trials = Callable[..., Kernels]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trials]:
    """Return a function that adds a kernel module. Each trial of the module raises the next of the given errors."""
    monkeypatch.setattr(triton_kernels, "KERNELS", {})
    monkeypatch.setattr(triton_kernels, "RETRY_S", 0.0)
    triton_kernels.forget()

    def add(name: str, *errors: Exception) -> Kernels:
        left, module = list(errors), ModuleType(name)

        def try_out(device: torch.device) -> None:
            if left:
                raise left.pop(0)

        module.try_out = try_out  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        return Kernels(name, f"steps of {name}", 1)

    yield add
    triton_kernels.forget()


def test_a_trial_that_runs_out_of_memory_is_repeated(kernels: Trials) -> None:
    some = kernels("some_kernels", torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        some.working(CPU)
    assert some.working(CPU) is sys.modules["some_kernels"]


def test_a_trial_is_repeated_once_if_another_process_changes_the_cache(kernels: Trials) -> None:
    busy, gone = OSError(16, "Device or resource busy"), FileNotFoundError(2, "gone")
    once, twice = kernels("once", busy), kernels("twice", busy, gone)
    assert once.working(CPU) is sys.modules["once"]
    with pytest.warns(UserWarning, match="steps of twice on cpu run without Triton"):
        assert twice.working(CPU) is None


def test_all_kernels_are_tried_but_failed_or_withheld_ones_are_not_used(kernels: Trials) -> None:
    several = [kernels("fine"), kernels("broken", RuntimeError("no compiler\nin /usr/bin")), kernels("others_lack")]
    with pytest.warns(UserWarning, match="steps of broken"):
        failures = triton_kernels.try_all(CPU, torch.bfloat16, several)
    assert failures == {"broken": "no compiler"}
    triton_kernels.withhold(["others_lack"])
    assert [one.working(CPU) is not None for one in several] == [True, False, False]


def test_each_kernel_is_reported_before_triton_compiles_it() -> None:
    run_cases(Path(__file__).with_name("compiling_cases.py"), compiles=True)


def test_the_reported_number_of_kernels_equals_the_number_launched_by_the_trials() -> None:
    run_cases(Path(__file__).with_name("kernel_count_cases.py"), on_cpu=True)


def test_a_new_kernel_is_counted_and_tried_but_not_used_if_it_is_wrong() -> None:
    run_cases(Path(__file__).with_name("new_kernel_cases.py"), on_cpu=True)


def kernels_of(module: Path) -> Iterator[ast.FunctionDef]:
    for one in ast.parse(module.read_text()).body:
        if isinstance(one, ast.FunctionDef) and any(ast.unparse(by) == "triton.jit" for by in one.decorator_list):
            yield one


def test_no_kernel_combines_a_check_for_none_with_another_condition_in_one_branch() -> None:
    # If the tensor is None, Triton 3.2 (PyTorch 2.6) still compiles a branch with such a condition, and fails.
    modules = sorted(Path(trainer.__file__).parent.rglob("triton_*.py"))
    kernels = [(module, kernel) for module in modules for kernel in kernels_of(module)]
    assert len(kernels) > 20
    asks = [
        f"{module.name}: {ast.unparse(one.test)}"
        for module, kernel in kernels
        for one in ast.walk(kernel)
        if isinstance(one, ast.If | ast.IfExp) and isinstance(one.test, ast.BoolOp) and "None" in ast.unparse(one.test)
    ]
    assert asks == []

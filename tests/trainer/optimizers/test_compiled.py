from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.optimizers import compiled
from trainer.optimizers.compiled import Compiled
from trainer.runtime import triton_kernels
from trainer.runtime.triton_kernels import COMPILED_UPDATES


class OnGpu(Tensor):
    """A CPU tensor that pretends to be on a GPU."""

    @property
    def is_cuda(self) -> bool:
        return True


def large() -> Tensor:
    return torch.zeros(2**16).as_subclass(OnGpu)


def test_a_function_that_cannot_be_compiled_runs_uncompiled_and_warns_once(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    def broken(function: object, **options: object) -> object:
        def fails(*arguments: object) -> None:
            raise RuntimeError("no C compiler\nand a long trace")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    function, tensor = Compiled(lambda tensor, by: tensor.add_(by)), large()
    function(tensor, 2.0)
    function(tensor, 3.0)
    assert bool((tensor == 5).all())
    assert [str(warning.message) for warning in recwarn] == [
        "the optimizer runs uncompiled, which is slower: no C compiler"
    ]


def test_running_out_of_memory_does_not_count_as_a_failure_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "compile", lambda function, **options: full)
    with pytest.raises(torch.OutOfMemoryError):
        Compiled(full)(large())


@pytest.mark.parametrize("tensor", [torch.zeros(2**16), torch.zeros(9).as_subclass(OnGpu)])
def test_nothing_is_compiled_for_a_cpu_or_a_small_tensor(tensor: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "compile")
    Compiled(lambda tensor: tensor.add_(1))(tensor)
    assert bool((tensor == 1).all())


def test_nothing_is_compiled_if_another_rank_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "compile")
    tensor = large()
    triton_kernels.withhold([COMPILED_UPDATES.module])
    try:
        Compiled(lambda tensor: tensor.add_(1))(tensor)
    finally:
        triton_kernels.forget()
    assert bool((tensor == 1).all())


@pytest.mark.parametrize("is_right", [True, False])
def test_the_compiler_trial_checks_the_result(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_it(function: Callable[..., None], **options: object) -> Callable[..., None]:
        return function if is_right else lambda values: None

    monkeypatch.setattr(torch, "compile", compile_it)
    with contextlib.nullcontext() if is_right else pytest.raises(RuntimeError, match="wrong results"):
        compiled.try_out(torch.device("cpu"))

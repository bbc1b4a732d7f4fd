"""Counts the kernels that all trials would compile on a GPU, by running the trials in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from support.launch_counter import NoGpu
from triton.runtime.driver import driver
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from trainer.runtime.triton_kernels import COMPILED_UPDATES, KERNELS, _hook_of_triton, n_kernels, try_all


def test_the_trials_launch_as_many_kernels_as_the_reported_total(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: set[tuple[str, str]] = set()
    compiled: dict[int, JITFunction] = {}
    run = InterpretedFunction.run

    def count(interpreted: InterpretedFunction, *arguments, grid, warmup=False, **options):
        kernel = compiled.setdefault(id(interpreted), JITFunction(interpreted.fn))
        kernel.run(*arguments, grid=grid, warmup=True, **options)
        return run(interpreted, *arguments, grid=grid, warmup=warmup, **options)

    def begin(*, key: str, fn, **_) -> bool:
        begun.add((fn.name, key))
        return True  # skip the compilation

    driver.set_active(NoGpu())
    monkeypatch.setattr(*_hook_of_triton(), begin)
    monkeypatch.setattr(InterpretedFunction, "run", count)
    found: dict[str, int] = {}
    for one in (one for one in KERNELS.values() if one != COMPILED_UPDATES):
        before = len(begun)
        assert try_all(torch.device("cpu"), torch.bfloat16, [one]) == {}
        found[one.module] = len(begun) - before
    # The number of kernels depends slightly on the Triton version.
    assert abs(sum(found.values()) - n_kernels()) <= 2
    assert {module: n for module, n in found.items() if abs(n - KERNELS[module].n) > 1} == {}

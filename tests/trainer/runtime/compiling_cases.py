"""Tests progress reports while Triton compiles kernels for a GPU that does not exist on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from support.launch_counter import NoGpu
from triton.runtime.driver import driver

from trainer.contract.store.metrics_store import is_before_first_step
from trainer.ranks import training_work
from trainer.ranks.training_work import Compiling
from trainer.reporting.progress import RunProgress
from trainer.runtime.triton_kernels import n_kernels, report_compiling


@triton.jit
def _double(x, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, 2 * tl.load(x + at))


class Phases(RunProgress):
    """A `RunProgress` that records every phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[str] = []

    def heartbeat(self, phase: str, step: int, tokens: int) -> None:
        super().heartbeat(phase, step, tokens)
        self.phases.append(phase)


@pytest.fixture(autouse=True)
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    driver.set_active(NoGpu())


def test_until_training_starts_each_compiled_kernel_is_reported_as_a_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_work, "SLOW_S", 0.0)
    progress = Phases()
    report_compiling(Compiling(progress, 7, 70).begin)
    x = torch.ones(64)
    kernels = [_double.warmup(x, x, n, grid=(1,)) for n in (16, 32, 16)]
    # The hook does not prevent compilation, so the kernel is compiled once for each n.
    assert all(kernel.asm["ptx"] for kernel in kernels)
    assert progress.phases == [f"compiling kernels, {number} of {n_kernels()}" for number in (1, 2)]
    assert progress.place == (progress.phases[-1], 7)
    assert all(map(is_before_first_step, progress.phases))
    assert f"compiling kernel 2 of {n_kernels()} for the first time on this machine" in capsys.readouterr().out
    progress.heartbeat("training", 8, 80)
    _double.warmup(x, x, 64, grid=(1,))
    assert progress.place == ("training", 8)

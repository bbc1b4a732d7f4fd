"""Tests adding a kernel to the registry, using Triton's interpreter on a CPU that pretends to be a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from support import toy_kernels
from support.fake_gpu import CPU, job_of
from torch import Tensor

from trainer.parallel.group import Group
from trainer.parallel.same_kernels import agree
from trainer.runtime.triton_kernels import KERNELS, Kernels, forget, n_kernels

X = torch.arange(150.0)


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test with an empty kernel registry."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with mock.patch.dict(KERNELS, clear=True):
        yield
    forget()


def doubled(kernels: Kernels, x: Tensor) -> Tensor:
    if triton := kernels.on(x):
        by_kernel: Tensor = triton.double(x)
        return by_kernel
    return x + x


def reported() -> list[str]:
    """Return the messages that ranks report when they agree on kernels before a job starts."""
    sentences: list[str] = []
    agree(Group(), CPU, job_of({}, {}), compiles=True, report=sentences.append)
    return sentences


def test_adding_a_kernel_takes_only_one_file_and_one_line() -> None:
    toy = Kernels("support.toy_kernels", "doubled numbers", 1)
    assert n_kernels() == 1
    with mock.patch.object(toy_kernels, "try_out", wraps=toy_kernels.try_out) as trial:
        assert reported() == []
        with mock.patch.object(toy_kernels, "double", wraps=toy_kernels.double) as kernel:
            assert torch.equal(doubled(toy, X), 2 * X)
    kernel.assert_called_once_with(X)
    trial.assert_called_once_with(CPU)


def test_a_kernel_with_wrong_results_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = Path(toy_kernels.__file__).read_text()
    (tmp_path / "wrong_kernels.py").write_text(right.replace("2 * tl.load", "3 * tl.load"))
    monkeypatch.syspath_prepend(tmp_path)
    assert torch.equal(importlib.import_module("wrong_kernels").double(X), 3 * X)
    wrong = Kernels("wrong_kernels", "doubled numbers", 1)
    warning = "doubled numbers on cpu run without Triton, which is slower: the kernel gives wrong"
    with pytest.warns(UserWarning, match=warning):
        assert torch.equal(doubled(wrong, X), 2 * X)
    assert not wrong.is_withheld
    cause = "it fails (the kernel gives wrong results)"
    assert reported() == [f"doubled numbers run without Triton, which is slower: {cause}"]
    assert wrong.is_withheld

"""Tests that out-of-memory errors from all libraries are recognised."""

from __future__ import annotations

import pytest
import torch
from support import little_memory
from support.forked import in_loaded_process

from trainer.runtime.out_of_memory import is_shortage


def test_every_error_from_a_matmul_that_runs_out_of_memory_is_recognised() -> None:
    unknown = [words for words, is_known in in_loaded_process(little_memory.errors) if not is_known]
    assert unknown == []


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("could not create a primitive"), True),
        (RuntimeError("could not create a primitive descriptor for the matmul primitive"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_errors_about_memory_count_as_running_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_shortage(error) == expected

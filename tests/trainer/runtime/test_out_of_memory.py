"""Memory that has run out is recognised, whichever library says so."""

from __future__ import annotations

import pytest
import torch
from support import little_memory
from support.forked import in_loaded_process

from trainer.runtime.out_of_memory import is_shortage


def test_a_product_says_nothing_else_in_too_little_memory() -> None:
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
def test_other_errors_are_not_taken_for_it(error: Exception, expected: bool) -> None:
    assert is_shortage(error) == expected

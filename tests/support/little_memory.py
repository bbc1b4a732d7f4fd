"""Collects the errors that a matmul raises if there is not enough memory, each in a separate process."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.runtime.out_of_memory import is_shortage

STEP_BYTES, N_STEPS = 2**16, 24


def errors() -> list[tuple[str, bool]]:
    """Return the errors for increasing memory limits, as pairs: the message, and whether it is recognised as out of
    memory.
    """
    # Force the same code path on CPUs with newer instruction sets.
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    return [error for step in range(N_STEPS) for error in _error(step * STEP_BYTES)]


def _error(n_bytes: int) -> Iterator[tuple[str, bool]]:
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            _multiply(n_bytes)
        except Exception as error:
            os.write(writing, f"{is_shortage(error):d}{error}".encode())
        os._exit(0)
    os.close(writing)
    with open(reading, errors="replace") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    if said:
        yield said[1:], said[0] == "1"


def _multiply(n_bytes: int) -> None:
    """Multiply bf16 matrices while the process may allocate only `n_bytes` more memory.

    oneDNN compiles code for this matmul.
    """
    x, W, bias = torch.ones(512, 32).bfloat16(), torch.ones(32, 1024).bfloat16(), torch.ones(1024).bfloat16()
    into = torch.empty(512, 1024, dtype=torch.bfloat16)
    size = re.search(r"^VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert size
    limit = 1024 * int(size[1]) + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.addmm(bias, x, W, out=into)

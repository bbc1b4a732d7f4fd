"""Compares the memory estimate with the memory that real steps reserve on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from trainer.contract.planning import memory
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.sources import DataShape
from trainer.self_test.base import Check, Size, job_of, learner_of, let_some_die, take

TOLERANCE = 0.10
WIDE, USUAL = Size(2304, 65536, 64, 4096), Size(768, 24576, 32, 4096)
CASES: tuple[tuple[Size, dict[str, Any], dict[str, Any]], ...] = (
    (USUAL, {"architecture": "topk"}, {}),
    (USUAL, {"architecture": "topk"}, {"precision": "fp32"}),
    (USUAL._replace(batch_size=32768), {"architecture": "topk"}, {}),
    (USUAL, {"architecture": "matryoshka_batch_topk"}, {}),
    (USUAL, {"architecture": "jumprelu"}, {}),
    (USUAL, {"architecture": "gated"}, {}),
    (USUAL, {"architecture": "standard"}, {}),
    (WIDE, {"architecture": "topk"}, {}),
    (WIDE, {"architecture": "topk"}, {"state": "int8"}),
    (WIDE, {"architecture": "topk"}, {"optimizer": "signum"}),
    (WIDE, {"architecture": "batch_topk"}, {}),
)


def check_memory(device: torch.device) -> Iterator[Check]:
    """Compare the memory that a few steps reserve with the estimate, if the GPU has enough free memory.

    Compiled updates need less memory, but are not available on all installations, so the measured memory may lie
    between the estimates with and without them. The reserved memory is the same as in a run only if a run's environment
    variables (`cuda_variables`) were set before PyTorch was loaded: with segments of fixed sizes, a batch of 32,768
    tokens takes 1.1 GB more.
    """
    if device.type != "cuda":
        return
    for size, sae, train in CASES:
        _clear()
        job = job_of(size, sae, train)
        work = Workload(job, 1, DataShape(size.d_in, None, 10**9), "")
        least, needs = (memory.of_plain_steps(work, is_compiled=one) for one in (True, False))
        if needs > torch.cuda.mem_get_info(device)[0]:
            continue
        learner = learner_of(job, size.d_in, device)
        x = torch.randn(size.batch_size, size.d_in, device=device)
        for number in range(4):
            if number == 2 and "topk" in sae["architecture"]:
                let_some_die(learner)
            take(learner, number, x)
        torch.cuda.synchronize(device)
        reserved = torch.cuda.max_memory_reserved(device)
        name = " ".join([sae["architecture"], f"{size.d_in} to {size.d_sae}", *map(str, train.values())])
        found = {"estimated_bytes": needs, "reserved_bytes": reserved, "ratio": needs / reserved}
        found["allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        is_near = reserved / needs <= 1 + TOLERANCE and least / reserved <= 1 + TOLERANCE
        yield Check("memory", name, is_near, found | {"estimated_compiled_bytes": least})
        del learner, x


def _clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

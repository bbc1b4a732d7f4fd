"""Calls a driver that may never respond. Every call runs on a separate thread and has a timeout."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from functools import partial

from sae_tui.gpu import faults, vendor_to_name
from sae_tui.gpu.base import GPU_LIMIT_S, OPEN_LIMIT_S, GpuSample, GpuSource
from sae_tui.gpu.detailed import vendor_of
from sae_tui.threads import on_thread

CLOSE_LIMIT_S = 2.0


def open_source(source: GpuSource, limit_s: float = OPEN_LIMIT_S) -> int:
    """Open the source and return the number of GPUs; raise `SourceUnavailable` on failure or timeout."""
    try:
        return on_thread(source.open).result(limit_s)
    except TimeoutError:
        raise faults.silent(limit_s, vendor_to_name(source.name).tool) from None


def close_source(source: GpuSource, limit_s: float = CLOSE_LIMIT_S) -> None:
    """Close the driver because a GPU cannot be reset while the driver is open; give up after `limit_s` seconds."""
    with contextlib.suppress(Exception):
        on_thread(source.close).result(limit_s)


def read_all(source: GpuSource, count: int, limit_s: float = GPU_LIMIT_S) -> tuple[GpuSample, ...]:
    """Read all GPUs in parallel and return one sample per GPU; a hung GPU's sample is unhealthy."""
    answers = [on_thread(partial(source.sample, index, processes=True)) for index in range(count)]
    deadline = time.monotonic() + limit_s
    return tuple(
        _sample(index, answer, deadline, limit_s, vendor_of(source, index)) for index, answer in enumerate(answers)
    )


def _sample(index: int, answer: Future[GpuSample], deadline: float, limit_s: float, vendor: str) -> GpuSample:
    """Return the sample, or an unhealthy sample if the GPU failed or did not respond before the deadline."""
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        reason = f"did not respond within {limit_s:g} s"
    except Exception as error:
        reason = f"reading it failed: {error!r}"
    return GpuSample(
        index, f"GPU-index-{index}", f"GPU {index}", time.time(), healthy=False, reason=reason, vendor=vendor
    )

"""One reading of every GPU, each on a thread of its own, so that a card that hangs is a row and no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import msgspec

from sae_tui.gpu.base import GpuSample, GpuSource, SourceUnavailable
from sae_tui.jobs.availability import GpuChoice, choices
from sae_tui.jobs.occupancy import Occupancy

LIMIT_S = 2.0
THREAD_NAME = "gpu-once"
T = TypeVar("T")


class Snapshot(msgspec.Struct, frozen=True):
    """Samples and what they mean for a new job; `problem` says why there are none."""

    samples: tuple[GpuSample, ...]
    choices: tuple[GpuChoice, ...]
    source_name: str
    cuda: bool
    problem: str = ""


def take(source: GpuSource, occupancy: Occupancy, limit_s: float = LIMIT_S) -> Snapshot:
    """Reads all cards at the same time; never takes longer than twice the limit."""
    samples: tuple[GpuSample, ...] = ()
    problem = ""
    try:
        count = _on_thread(source.open).result(limit_s)
        samples = _samples(source, count, limit_s)
    except SourceUnavailable as error:
        problem = str(error)
    except TimeoutError:
        problem = f"the GPU driver did not answer within {limit_s:g} s; see whether nvidia-smi does"
    return Snapshot(samples, choices(samples, occupancy.holders()), source.name, source.cuda, problem)


def is_stuck() -> bool:
    """Whether a reading has not come back, so that only `os._exit` is sure to leave."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def _samples(source: GpuSource, count: int, limit_s: float) -> tuple[GpuSample, ...]:
    answers = [_on_thread(partial(source.sample, index, processes=True)) for index in range(count)]
    deadline = time.monotonic() + limit_s
    return tuple(_sample(index, answer, deadline, limit_s) for index, answer in enumerate(answers))


def _sample(index: int, answer: Future[GpuSample], deadline: float, limit_s: float) -> GpuSample:
    try:
        return answer.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        reason = f"did not answer within {limit_s:g} s"
    except Exception as error:
        reason = f"reading it failed: {error!r}"
    return GpuSample(index, f"GPU-index-{index}", f"GPU {index}", time.time(), healthy=False, reason=reason)


def _on_thread(call: Callable[[], T]) -> Future[T]:
    """Starts a call that may never return."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return answer

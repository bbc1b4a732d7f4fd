"""Asking a driver that may never answer: every call on a thread of its own, waited for no longer than a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from sae_tui.gpu.base import GpuSample, GpuSource

LIMIT_S = 2.0
THREAD_NAME = "gpu-once"
T = TypeVar("T")


def on_thread(call: Callable[[], T]) -> Future[T]:
    """Starts a call that may never return."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=THREAD_NAME, daemon=True).start()
    return answer


def is_stuck() -> bool:
    """Whether a call has not come back, so that only `os._exit` is sure to leave."""
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


def read_all(source: GpuSource, count: int, limit_s: float = LIMIT_S) -> tuple[GpuSample, ...]:
    """One sample of every card, all read at the same time; a card that hangs is a row and no more."""
    answers = [on_thread(partial(source.sample, index, processes=True)) for index in range(count)]
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

"""Measures a run's speed, waiting times and memory."""

from __future__ import annotations

import math
import resource
import time
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from trainer.runtime.device_queue import Stopwatch, stopwatch

if TYPE_CHECKING:
    from trainer.parallel.base import Parallel
    from trainer.parallel.waiting import Waits

# The time constant of a `Rate`: much longer than a step, but short enough that a user soon notices a slowdown.
WINDOW_S = 5.0
# A long wait starts when, for LASTING_S seconds, all ranks have spent more than the fraction MUCH_WAIT of their time
# waiting for data. The wait ends when the fraction falls below LITTLE_WAIT. For example, if 8 GPUs share latents and
# each reads all rows, the host's memory bandwidth limits a run to one step per 9 ms, while the GPUs need only 6 ms.
MUCH_WAIT, LITTLE_WAIT, LASTING_S = 0.1, 0.05, 10.0


class Rate:
    """A moving average of an amount per second, with exponential decay over `WINDOW_S`.

    Amounts and seconds are summed separately with the same decay, so each interval is weighted by its length.
    """

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> float:
        """Add an interval and return the rate at its end."""
        fade = math.exp(-seconds / WINDOW_S)
        self._amount = fade * self._amount + amount
        self._seconds = fade * self._seconds + seconds
        return self._amount / max(self._seconds, 1e-9)


# The minimum fraction of an interval that is reported as busy. The interval and the waiting times are measured
# separately, so their difference can be 0 even though the rank was busy.
LEAST_BUSY = 0.01


class Span(NamedTuple):
    """One rank's log interval: tokens, steps, seconds spent waiting for data and other ranks, and thread CPU time."""

    watch: Stopwatch
    n_tokens: int
    n_steps: int
    data_s: float
    of_ranks: Waits
    on_core_s: float


class Pace:
    """Measures one rank's log intervals."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._all, self._own = Rate(), Rate()
        # Bytes of GPU memory in use outside the allocator after the first interval: NCCL, kernels and the CUDA context.
        self._foreign_at_first: int | None = None
        self.begin(0.0)

    def begin(self, waited_for_data_s: float) -> None:
        """Start the clocks; call this at the start of an interval's first step."""
        self._parallel.take_waits()
        self._watch, self._waited_before = stopwatch(self._parallel.device), waited_for_data_s
        self._on_core_before = time.thread_time()

    def end(self, n_tokens: int, n_steps: int, waited_for_data_s: float) -> Span:
        """Stop the clocks after an interval's last step is queued; `n_tokens` is this rank's number of tokens."""
        self._watch.stop()
        on_core_s = time.thread_time() - self._on_core_before
        data_s = waited_for_data_s - self._waited_before
        return Span(self._watch, n_tokens, n_steps, data_s, self._parallel.take_waits(), on_core_s)

    def sums(self, span: Span) -> dict[str, Tensor]:
        """Wait for a span's end and return this rank's values on the CPU; the caller sums them over all ranks."""
        n_tokens, n_steps, data_s, seconds = span.n_tokens, span.n_steps, span.data_s, span.watch.seconds()
        own_s = max(seconds - span.of_ranks.seconds(), LEAST_BUSY * seconds)
        busy_s = max(own_s - data_s, LEAST_BUSY * seconds)
        # Ranks that share latents or train different SAEs process the same tokens.
        with_same = self._parallel.world_size / self._parallel.data.size
        total = [n_tokens / with_same, seconds, data_s, 1]
        device, slot = self._parallel.device, self._parallel.slot
        return {
            "pace": torch.tensor(total, dtype=torch.float64),
            "rank_tokens_per_s": slot(self._own.add(n_tokens, own_s)),
            "step_ms": slot(1000 * seconds / n_steps),
            "busy_ms": slot(1000 * busy_s / n_steps),
            "data_ms": slot(1000 * data_s / n_steps),
            "rank_memory_bytes": slot(memory_bytes(device)),
            "core_share": slot(min(1.0, span.on_core_s / busy_s) if device.type != "cuda" else 0.0),
            "foreign_bytes": slot(self._more_foreign(device)),
        }

    def _more_foreign(self, device: torch.device) -> int:
        """Return the growth in GPU memory used outside this process's allocator since the first interval, in bytes."""
        now = foreign_bytes(device)
        self._foreign_at_first = now if self._foreign_at_first is None else self._foreign_at_first
        return max(0, now - self._foreign_at_first)

    def values(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Return the total tokens per second, the fraction of time spent waiting for data, and the peak memory."""
        n_tokens, seconds, waited_s, ranks = totals["pace"].tolist()
        return {
            "tokens_per_s": self._all.add(n_tokens, seconds / ranks),
            # The host starts to wait slightly earlier than the GPU would, so the quotient may exceed 1.
            "data_wait": min(1.0, waited_s / max(seconds, 1e-9)),
            "memory_bytes": float(totals["rank_memory_bytes"].max()),
        }


URL_REMEDY = (
    "a shard from the URL arrives too late; store fewer bytes (extract.dtype), or let more shards stay in the cache"
    " (data.cache_gb)"
)
STORED_REMEDY = "copy the rows of data.path to a local disk, or store fewer bytes (extract.dtype)"
STREAM_REMEDY = (
    "give the language model more GPUs (data.model_gpus), or store its activations first (`sae-train extract`)"
)


class DataWait:
    """Detects when all ranks are waiting for data; a rank that waits longer than the others is a straggler instead."""

    def __init__(self) -> None:
        self._lasts_s = 0.0
        self._is_reported = False

    def look(self, share: float, seconds: float) -> bool | None:
        """Check the fraction of a log interval spent waiting; return True when a long wait starts, False when it ends.

        Return None in all other cases.
        """
        self._lasts_s = self._lasts_s + seconds if share > MUCH_WAIT else 0.0
        if not self._is_reported and self._lasts_s >= LASTING_S:
            self._is_reported = True
            return True
        if self._is_reported and share < LITTLE_WAIT:
            self._is_reported = False
            return False
        return None


def memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory in bytes: reserved on its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return int(_reserved(device)["peak"])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def foreign_bytes(device: torch.device) -> int:
    """Return the GPU memory in use outside this process's allocator, in bytes; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, total - free - int(_reserved(device)["current"]))


def _reserved(device: torch.device) -> dict[str, int]:
    """Return the current and peak number of bytes that the allocator has reserved.

    torch's usual functions, such as `memory_reserved`, sort a hundred statistics on every call.
    """
    of_all: dict[str, int] = torch.cuda.memory_stats_as_nested_dict(device)["reserved_bytes"]["all"]
    return of_all

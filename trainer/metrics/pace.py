"""How fast a run goes, what it waits for, and how much memory it takes."""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.metrics.rate import Rate

if TYPE_CHECKING:
    from trainer.parallel.base import Parallel

# Work and waiting are timed separately; a rank that seems to have done nothing but wait did something all the same.
LEAST_BUSY = 0.01


class Pace:
    """The clocks of one rank over a log interval."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._all, self._own = Rate(), Rate()
        self.begin(0.0)

    def begin(self, waited_for_data_s: float) -> None:
        """Starts the clocks; called as the first step of an interval starts."""
        self._parallel.waited_s()
        self._began, self._waited_before = time.perf_counter(), waited_for_data_s

    def sums(self, n_tokens: int, n_steps: int, waited_for_data_s: float) -> dict[str, Tensor]:
        """This rank's part of everybody's pace since `begin`, to be added over ranks; n_tokens are its own."""
        seconds = time.perf_counter() - self._began
        rate = self._own.add(n_tokens, max(seconds - self._parallel.waited_s(), LEAST_BUSY * seconds))
        # Ranks that share the latents have the same tokens.
        total = [n_tokens / self._parallel.latents.size, seconds, waited_for_data_s - self._waited_before, 1]
        slot = self._parallel.slot
        return {
            "pace": torch.tensor(total, dtype=torch.float64, device=self._parallel.device),
            "rank_tokens_per_s": slot(rate),
            "step_ms": slot(1000 * n_tokens / n_steps / rate),
            "memory_bytes": slot(memory_bytes(self._parallel.device)),
        }

    def values(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Tokens of all ranks per second, the share of time spent waiting for data, and the fullest rank's memory."""
        n_tokens, seconds, waited_s, ranks = totals["pace"].tolist()
        return {
            "tokens_per_s": self._all.add(n_tokens, seconds / ranks),
            "data_wait": waited_s / max(seconds, 1e-9),
            "memory_bytes": float(totals["memory_bytes"].max()),
        }


def memory_bytes(device: torch.device) -> int:
    """The most this process has held so far: on its GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

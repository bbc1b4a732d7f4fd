"""Marks a training step's phases for `torch.profiler`."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

# The FORWARD phase includes the ENCODER phase.
FORWARD, ENCODER = "sae:forward", "sae:encoder"
BACKWARD, METRICS, EXCHANGE, UPDATE = "sae:backward", "sae:metrics", "sae:exchange", "sae:update"

_UNMARKED = contextlib.nullcontext()


def phase(name: str) -> contextlib.AbstractContextManager[Any]:
    """Mark the operations inside the context as the phase `name` if a profiler is running.

    Without a profiler, this takes 0.4 µs, while `record_function` would take 20 µs; a step has six phases.
    """
    return record_function(name) if _profiler_enabled() else _UNMARKED

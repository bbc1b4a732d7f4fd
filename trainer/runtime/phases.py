"""The phases of a training step, as `torch.profiler` shows them."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

# The encoder is a part of the forward pass.
FORWARD, ENCODER = "sae:forward", "sae:encoder"
BACKWARD, METRICS, EXCHANGE, UPDATE = "sae:backward", "sae:metrics", "sae:exchange", "sae:update"

_UNMARKED = contextlib.nullcontext()


def phase(name: str) -> contextlib.AbstractContextManager[Any]:
    """Mark the time inside the context as the phase `name` of the profile that is being taken, if one is.

    Where nobody profiles, this takes 0.4 µs and `record_function` 20; a step has six of them.
    """
    return record_function(name) if _profiler_enabled() else _UNMARKED

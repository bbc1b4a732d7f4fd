"""The buffer size for active latents that a GPU allocates before it knows their number
(`trainer.saes.kernels.buffer_sizer`).
"""

from __future__ import annotations

import math

# Over-allocation factor, relative to the previous steps.
MARGIN = 1.25
# If more than one in this many pre-activations is active, dense products are as fast on a GPU. The model gives one in
# 70 to 110 for 65,536 latents and a d_in of 2,304, one in 45 to 75 for 24,576 and 768.
DENSE = 96


def per_token(n_active: float, d_sae: int, kept: int | None = None) -> int | None:
    """Return the active latents per token to allocate space for, given `n_active` so far; None if all `d_sae` are
    cheaper.

    Rounded up to 3 binary digits, so that a run uses few buffer sizes. A previous size `kept` remains if it equals the
    new one or the next above: a k of 32 or 64 lies right at a boundary, and every change of size discards captured CUDA
    graphs.
    """
    capacity = _rounded_up(MARGIN * n_active)
    if kept and capacity <= kept <= _rounded_up(capacity + 1):
        capacity = kept
    return capacity if capacity * DENSE <= d_sae else None


def _rounded_up(number: float) -> int:
    step = 1 << max(0, int(number).bit_length() - 3)
    return max(1, math.ceil(number / step)) * step

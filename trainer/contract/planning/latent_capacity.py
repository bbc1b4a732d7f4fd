"""Chooses the size of the buffer that a GPU allocates for active latents before it knows how many there are.

The buffer is described in `trainer.saes.kernels.buffer_sizer`.
"""

from __future__ import annotations

import math

# The factor by which the buffer exceeds the number of active latents in previous steps.
MARGIN = 1.25
# If more than one in `DENSE` pre-activations is active, dense matmuls are just as fast on a GPU. The cost model puts
# this point at one in 70 to 110 for 65,536 latents with a d_in of 2,304, and one in 45 to 75 for 24,576 latents with a
# d_in of 768.
DENSE = 96


def per_token(n_active: float, d_sae: int, kept: int | None = None) -> int | None:
    """Return the number of active latents per token to allocate memory for, given `n_active` in previous steps.

    Return None if processing all `d_sae` latents is cheaper. The number is rounded up to 3 significant binary digits to
    limit the number of buffer sizes in a run. A previous size `kept` is retained if it equals the new size or the next
    larger size, because a k of 32 or 64 lies exactly at a boundary and every size change discards captured CUDA graphs.
    """
    capacity = _rounded_up(MARGIN * n_active)
    if kept and capacity <= kept <= _rounded_up(capacity + 1):
        capacity = kept
    return capacity if capacity * DENSE <= d_sae else None


def _rounded_up(number: float) -> int:
    step = 1 << max(0, int(number).bit_length() - 3)
    return max(1, math.ceil(number / step)) * step

"""For how many active latents a GPU makes room before their number is known: `trainer.saes.kernels.foreseen`."""

from __future__ import annotations

import math

# Room is made for so many times as many as in the steps before.
MARGIN = 1.25
# Dense products take a GPU as long as sparse ones of one in so many pre-activations: by the model one in 70 to 110 with
# 65,536 latents and a d_in of 2,304, one in 45 to 75 with 24,576 and 768.
DENSE = 96


def per_token(n_active: float, d_sae: int, kept: int | None = None) -> int | None:
    """Return for how many of a token's `d_sae` latents to make room if `n_active` were active; None where for all.

    It is rounded up to 3 binary digits, so that a run has few sizes of memory. A room that is `kept` from before stays
    where it is the least or the one above that: a k of 32 or 64 is just where one size ends, and every change of size
    costs recorded steps their recording.
    """
    room = _rounded_up(MARGIN * n_active)
    if kept and room <= kept <= _rounded_up(room + 1):
        room = kept
    return room if room * DENSE <= d_sae else None


def _rounded_up(number: float) -> int:
    step = 1 << max(0, int(number).bit_length() - 3)
    return max(1, math.ceil(number / step)) * step

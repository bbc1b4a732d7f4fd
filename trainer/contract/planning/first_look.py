"""When it pays to find the largest pre-activations by a bf16 product first: `trainer.saes.kernels.rounded_top_k`."""

from __future__ import annotations

import functools
import math
from pathlib import Path

# How many values are looked at for each that is wanted. With 2, of 2,048 tokens of trained SAEs 0 to 50 needed the
# exact product. Where ranks share the latents it is per value that is wanted of one rank on average: with two ranks of
# 8,192 each, 37 of 4,096 tokens needed more than 2, none 2.5.
MARGIN, MARGIN_SHARED = 2, 2.5
# How many of these are computed exactly, since the others are surely too small: 64 to 72 % in trained SAEs.
EXACT = 0.7
# One value computed alone costs as much as COST values of a whole product: 8 to 10 on a Zen 4 core.
COST = 10
# How much longer it takes to choose the k of each token among exact values, as a share of the exact product's time.
# With 2,048 latents and k = 64 a step of 2,048 tokens takes 71 ms of a core with a first look and 96 without; with
# 4,096 and k = 256 as long. The k of a whole batch are found as fast in either.
CHOICE = 0.5
# The time of a product of bf16 factors as a share of the exact one's, by what the CPU has: matrix units, or vectors (on
# a Zen 4 core 54 ms instead of 107 with 3,072 latents, and a step with 16,384 took 0.53 s instead of 0.76).
_ROUNDED = {"amx_bf16": 0.2, "avx512_bf16": 0.5}


def n_seen(k: int, n_ranks: int) -> int:
    """Return how many values per token each of `n_ranks` looks at so that all together find the largest k."""
    return MARGIN * k if n_ranks == 1 else math.ceil(MARGIN_SHARED * k / n_ranks)


def pays(n_exact: float, d_sae: int, choice: float = CHOICE) -> bool:
    """Tell whether a rounded product first is faster on this CPU, given the values per token then computed exactly.

    It also makes the choice faster, by `choice` as a share of the exact product's time.
    """
    share = rounded_share()
    return share < 1 and COST * n_exact < (1 + choice - share) * d_sae


@functools.cache
def rounded_share() -> float:
    """Return the time of a product of bf16 factors as a share of the exact one's; 1 where the CPU has none of them."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return 1.0
    return min((share for flag, share in _ROUNDED.items() if flag in flags.split()), default=1.0)

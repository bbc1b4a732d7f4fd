"""When it pays to find the largest pre-activations by a bf16 product first: `trainer.saes.kernels.rounded_top_k`."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import NamedTuple

# How many values are looked at for each that is wanted. With 2, of 2,048 tokens of trained SAEs 0 to 50 needed the
# exact product. Where ranks share the latents it is per value that is wanted of one rank on average: with two ranks of
# 8,192 each, 37 of 4,096 tokens needed more than 2, none 2.5.
MARGIN, MARGIN_SHARED = 2, 2.5
# How many of these are computed exactly, since the others are surely too small: 64 to 72 % in trained SAEs.
EXACT = 0.7


class Costs(NamedTuple):
    """What a first look costs a CPU, by the time of the exact product of all values.

    `rounded` is the product of bf16 factors. A value computed alone, and chosen, costs as much as `alone` values of the
    exact product. Where all are exact it takes longer to choose the k of each token by `of_tokens`, and those of a
    whole batch by `of_batch`.
    """

    rounded: float
    alone: float
    of_tokens: float = 0.5
    of_batch: float = 0.0


# By what a CPU has, matrix units or vectors. To choose the k of each of 2,048 tokens takes a core with AMX 24 ms with a
# first look and 38 without, of 3,072 latents and k = 32; with k = 128 it takes 57 and 52, with 2,048 latents 27 and 36
# for k = 64, 47 and 36 for 128. Those of a whole batch: 36 and 37 for 3,072 and 64. A Zen 4 core takes 54 ms for the
# rounded product of 3,072 latents and 107 for the exact one; a step of 2,048 latents with k = 64 takes it 71 ms instead
# of 96, and one of 4,096 with k = 256 as long.
_COSTS = {"amx_bf16": Costs(0.2, 24, of_batch=0.3), "avx512_bf16": Costs(0.5, 10)}


def n_seen(k: int, n_ranks: int) -> int:
    """Return how many values per token each of `n_ranks` looks at so that all together find the largest k."""
    return MARGIN * k if n_ranks == 1 else math.ceil(MARGIN_SHARED * k / n_ranks)


def pays(n_exact: float, d_sae: int, *, of_batch: bool = False) -> bool:
    """Tell whether a rounded product first is faster on this CPU, given the values per token then computed exactly.

    The largest are those of each token, or those `of_batch` together.
    """
    if (cost := costs()) is None:
        return False
    choice = cost.of_batch if of_batch else cost.of_tokens
    return cost.alone * n_exact < (1 + choice - cost.rounded) * d_sae


@functools.cache
def costs() -> Costs | None:
    """Return what a first look costs this CPU; None where it is never faster."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return None
    return next((cost for flag, cost in _COSTS.items() if flag in flags.split()), None)

"""Decides whether a CPU should select the top pre-activations by a bf16 product first
(`trainer.saes.kernels.rounded_top_k`).
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import NamedTuple

# Candidates per wanted value. With 2, 0 to 50 of 2,048 tokens of trained SAEs needed the exact product. If ranks share
# the latents, the factor applies to the values wanted per rank on average: with two ranks of 8,192 latents each, 37 of
# 4,096 tokens needed more than 2, none more than 2.5.
MARGIN, MARGIN_SHARED = 2, 2.5
# The fraction of candidates that is computed exactly, since the others are surely too small: 64 to 72 % in trained
# SAEs.
EXACT = 0.7


class Costs(NamedTuple):
    """The cost of a bf16 pre-selection on a CPU, relative to the exact product of all values.

    `rounded` is the product with bf16 factors. Computing and choosing a single value costs the same as `alone` values
    of the exact product. Without pre-selection, choosing adds `of_tokens` (top k per token) or `of_batch` (per batch).
    """

    rounded: float
    alone: float
    of_tokens: float = 0.5
    of_batch: float = 0.0


# Costs by CPU feature (matrix or vector units), in ms for 2,048 tokens. A core with AMX chooses the top k per token in
# 24 with pre-selection and 38 without (3,072 latents, k = 32), in 57 and 52 for k = 128; with 2,048 latents in 27 and
# 36 for k = 64, 47 and 36 for k = 128. Per batch: 36 and 37 (3,072 latents, k = 64). A Zen 4 core takes 54 for the
# rounded product of 3,072 latents and 107 for the exact one; a step of 2,048 latents with k = 64 takes 71 instead of
# 96, and a step of 4,096 with k = 256 gains nothing.
_COSTS = {"amx_bf16": Costs(0.2, 24, of_batch=0.3), "avx512_bf16": Costs(0.5, 10)}


def n_seen(k: int, n_ranks: int) -> int:
    """Return how many candidates per token each of `n_ranks` selects, so that together they find the largest k."""
    return MARGIN * k if n_ranks == 1 else math.ceil(MARGIN_SHARED * k / n_ranks)


def pays(n_exact: float, d_sae: int, *, of_batch: bool = False) -> bool:
    """Return whether a rounded product first is faster on this CPU, if `n_exact` values per token are then computed
    exactly.

    The top values are chosen per token, or per batch with `of_batch`.
    """
    if (cost := costs()) is None:
        return False
    choice = cost.of_batch if of_batch else cost.of_tokens
    return cost.alone * n_exact < (1 + choice - cost.rounded) * d_sae


@functools.cache
def costs() -> Costs | None:
    """Return the cost of a pre-selection on this CPU; None if it is never faster."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return None
    return next((cost for flag, cost in _COSTS.items() if flag in flags.split()), None)

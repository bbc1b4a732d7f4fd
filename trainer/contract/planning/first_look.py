"""Decides whether a CPU should use a bf16 matmul to pre-select the top pre-activations.

`trainer.saes.kernels.rounded_top_k` performs the pre-selection.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import NamedTuple

# Number of candidates per requested value. With 2 candidates per value, 0 to 50 of 2,048 tokens needed the exact matmul
# in trained SAEs. If ranks share the latents, the number is relative to the average number of requested values per
# rank. With two ranks of 8,192 latents each, 37 of 4,096 tokens needed more than 2 candidates per value, and none
# needed more than 2.5.
MARGIN, MARGIN_SHARED = 2, 2.5
# The fraction of candidates whose exact values are computed; all other candidates are certain to be too small. In
# trained SAEs, the fraction was 64 to 72 %.
EXACT = 0.7


class Costs(NamedTuple):
    """The costs of a bf16 pre-selection on a CPU, in units of the exact matmul's cost per value.

    `rounded` is the cost of the bf16 matmul. `alone` is the cost of computing and selecting one value individually.
    `of_tokens` (for a top k per token) and `of_batch` (for a top k per batch) are the costs of selection without
    pre-selection.
    """

    rounded: float
    alone: float
    of_tokens: float = 0.5
    of_batch: float = 0.0


# Costs by CPU feature (matrix or vector units), from timings with 2,048 tokens. With 3,072 latents, a core with AMX
# selects the top k per token in 24 ms with pre-selection and 38 ms without for k = 32, and in 57 ms with and 52 ms
# without for k = 128. With 2,048 latents, the same core takes 27 ms with and 36 ms without for k = 64, and 47 ms with
# and 36 ms without for k = 128. A selection per batch takes 36 ms with and 37 ms without (3,072 latents, k = 64). A Zen
# 4 core takes 54 ms for the bf16 matmul with 3,072 latents and 107 ms for the exact matmul. On this core, pre-selection
# shortens a step with 2,048 latents and k = 64 from 96 to 71 ms, but not a step with 4,096 latents and k = 256.
_COSTS = {"amx_bf16": Costs(0.2, 24, of_batch=0.3), "avx512_bf16": Costs(0.5, 10)}


def n_seen(k: int, n_ranks: int) -> int:
    """Return how many candidates per token each of `n_ranks` ranks must select to find the k largest over all ranks."""
    return MARGIN * k if n_ranks == 1 else math.ceil(MARGIN_SHARED * k / n_ranks)


def pays(n_exact: float, d_sae: int, *, of_batch: bool = False) -> bool:
    """Return whether pre-selection with a bf16 matmul is faster on this CPU.

    `n_exact` is the number of values per token that are then computed exactly. The top values are selected per token,
    or per batch with `of_batch`.
    """
    if (cost := costs()) is None:
        return False
    choice = cost.of_batch if of_batch else cost.of_tokens
    return cost.alone * n_exact < (1 + choice - cost.rounded) * d_sae


@functools.cache
def costs() -> Costs | None:
    """Return the costs of pre-selection on this CPU, or None if pre-selection is never faster."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return None
    return next((cost for flag, cost in _COSTS.items() if flag in flags.split()), None)

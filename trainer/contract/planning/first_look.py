"""When the largest pre-activations are found by a rounded product first: see `trainer.saes.kernels.rounded_top_k`."""

from __future__ import annotations

import functools
from pathlib import Path

# Values that are then computed exactly for each one that is wanted: of 3,072 latents with norms between 1 and 2, fewer
# than 1 in 100 tokens then needed the exact product, of 16,384 latents 1 in 13. Where ranks share the latents, for each
# that is wanted of one of them on average: of two with 8,192 each, 37 of 4,096 tokens needed more than 2, none 2.5.
MARGIN, MARGIN_SHARED = 2, 3
# An exact value costs as much as so many of a whole product; the rounded product, this share of the exact one.
COST, ROUNDED = 20, 0.2


def n_seen(k: int, n_ranks: int) -> int:
    """How many values per token each of so many ranks computes exactly where k are wanted of all together."""
    return MARGIN * k if n_ranks == 1 else -(-MARGIN_SHARED * k // n_ranks)


def pays(n_exact: float, d_sae: int) -> bool:
    """Whether it is a faster way on this CPU where so many values per token are then computed exactly."""
    return COST * n_exact < d_sae and multiplies_bf16()


@functools.cache
def multiplies_bf16() -> bool:
    """Whether this CPU has matrix units for bf16 (AMX)."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return False
    return "amx_bf16" in flags.split()

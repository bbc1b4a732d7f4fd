"""The learning rate over a run."""

from __future__ import annotations


def lr_factor(step: int, total_steps: int, warmup_fraction: float, decay_fraction: float) -> float:
    """Share of the full rate for step 0 .. total_steps - 1: a linear rise, a plateau, a linear fall.

    No step has a factor of 0, which would be a step wasted.
    """
    warmup, decay = warmup_fraction * total_steps, decay_fraction * total_steps
    rising = (step + 1) / warmup if warmup else 1.0
    falling = (total_steps - step) / decay if decay else 1.0
    return min(1.0, rising, falling)

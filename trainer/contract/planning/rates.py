"""The peak learning rate of a training run, used between warm-up and decay."""

from __future__ import annotations

import math

from trainer.contract.errors import Problem
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.following import following_rates

# In runs with more steps than this, the automatic learning rate decreases with the length of the run.
LONG_RUN_STEPS = 1000
# A learning rate that exceeds the automatic rate by more than this factor is considered a typo: even at two or three
# times the automatic rate, every optimizer gave worse results.
_FAR_TOO_HIGH = 30


def full_rate(layout: Layout, d_sae: int, *, is_transcoder: bool) -> float:
    """Return the peak learning rate for an SAE with `d_sae` latents, after `lr_scaling`."""
    asked = layout.job.train.lr
    rate = auto_rate(layout, d_sae, is_transcoder=is_transcoder) if asked == "auto" else asked
    return rate * layout.lr_scale


def auto_rate(layout: Layout, d_sae: int, *, is_transcoder: bool) -> float:
    """Resolve `train.lr = "auto"` and return the learning rate."""
    following = following_rates(layout.job, is_transcoder=is_transcoder)
    train = layout.job.train
    rate = train.settings.auto_lr(d_sae)
    if following is None:
        return rate
    return rate * following.lr * (length_factor(layout.total_steps) if train.lr_length == "auto" else 1.0)


def length_factor(n_steps: int) -> float:
    """Return a factor of at most 1 that reduces the learning rate in long runs with tied encoder updates.

    Compared with the learning rate for short runs, the reduced rate lowered the held-out FVU of SAEs with 1,536 latents
    at two hooks by 0 and 0.4 % after 2,000 steps, and by 1.0 and 0.4 % after 10,000 steps. After 50,000 steps at the
    rate for short runs, 5 % of the latents were dead. See docs/quality.md.
    """
    return math.pow(LONG_RUN_STEPS / max(n_steps, LONG_RUN_STEPS), 0.2)


def rate_problems(layout: Layout, d_sae: int, *, is_transcoder: bool) -> list[Problem]:
    """Return a warning about a learning rate likely to make training diverge."""
    asked = layout.job.train.lr
    if asked == "auto":
        return []
    auto = auto_rate(layout, d_sae, is_transcoder=is_transcoder)
    if asked <= _FAR_TOO_HIGH * auto:
        return []
    message = f"{asked:g} is {asked / auto:,.0f} times the value of auto here, {auto:.2g}; training may diverge"
    return [Problem("train.lr", message, "warning")]

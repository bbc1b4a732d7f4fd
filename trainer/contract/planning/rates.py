"""The full learning rate of a training: that of its middle, which it rises to at first and falls from at the end."""

from __future__ import annotations

from trainer.contract.errors import Problem
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.following import following_rates

# So many times the rate of "auto" is a slip of the hand: every optimizer became worse at two or three times its own.
_FAR_TOO_HIGH = 30


def full_rate(layout: Layout, d_sae: int, *, is_transcoder: bool) -> float:
    """Return the rate of an SAE of this width, with what `lr_scaling` makes of it."""
    asked = layout.job.train.lr
    rate = auto_rate(layout, d_sae, is_transcoder=is_transcoder) if asked == "auto" else asked
    return rate * layout.lr_scale


def auto_rate(layout: Layout, d_sae: int, *, is_transcoder: bool) -> float:
    """Return what "auto" stands for."""
    following = following_rates(layout.job, is_transcoder=is_transcoder)
    return layout.job.train.knobs.auto_lr(d_sae) * (following.lr if following else 1.0)


def rate_problems(layout: Layout, d_sae: int, *, is_transcoder: bool) -> list[Problem]:
    """Warn of a rate with which training would most likely diverge."""
    asked = layout.job.train.lr
    if asked == "auto":
        return []
    auto = auto_rate(layout, d_sae, is_transcoder=is_transcoder)
    if asked <= _FAR_TOO_HIGH * auto:
        return []
    message = f"{asked:g} is {asked / auto:,.0f} times what auto stands for here, {auto:.2g}; training may diverge"
    return [Problem("train.lr", message, "warning")]

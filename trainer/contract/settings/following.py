"""Determines whether encoder updates are tied to decoder updates, and the resulting learning rates."""

from __future__ import annotations

from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS, FollowingRates
from trainer.contract.settings.job import JobConfig

# The share of a run over which the learning rate decays if updates are not tied; see `schedule`.
_USUAL_DECAY = 0.2


def following_rates(job: JobConfig, *, is_transcoder: bool) -> FollowingRates | None:
    """Return the rates for tied updates, or None if updates are not tied.

    Updates can be tied if the encoder starts as the transpose of the decoder, if neither is frozen, and if the
    architecture and the optimizer support tied updates.
    """
    starts_tied = job.sae.encoder_init == "tied" and not is_transcoder
    may_follow = job.sae.encoder_follows != "off" and job.sae.freeze == "off"
    if not may_follow or not starts_tied or not ARCHITECTURES[job.sae.architecture].encoder_follows:
        return None
    return OPTIMIZERS[job.train.optimizer].following


def decay_fraction(job: JobConfig, *, is_transcoder: bool) -> float:
    """Return the share of the steps over which the learning rate decays to 0."""
    if job.train.decay_fraction != "auto":
        return job.train.decay_fraction
    rates = following_rates(job, is_transcoder=is_transcoder)
    return rates.decay if rates else _USUAL_DECAY

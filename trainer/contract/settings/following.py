"""Whether the encoder of a latent moves with its decoder, and the rates of a training that follow from it."""

from __future__ import annotations

from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS, FollowingRates
from trainer.contract.settings.job import JobConfig

# The share of a run over which the rate falls where nothing follows; see `schedule`.
_USUAL_DECAY = 0.2


def following_rates(job: JobConfig, *, is_transcoder: bool) -> FollowingRates | None:
    """Return the rates where encoders follow: both start as one, and architecture and optimizer are made for it."""
    starts_tied = job.sae.encoder_init == "tied" and not is_transcoder
    if job.sae.encoder_follows == "off" or not starts_tied or not ARCHITECTURES[job.sae.architecture].encoder_follows:
        return None
    return OPTIMIZERS[job.train.optimizer].following


def decay_fraction(job: JobConfig, *, is_transcoder: bool) -> float:
    """Return the share of the steps over which the rate falls to 0."""
    if job.train.decay_fraction != "auto":
        return job.train.decay_fraction
    rates = following_rates(job, is_transcoder=is_transcoder)
    return rates.decay if rates else _USUAL_DECAY

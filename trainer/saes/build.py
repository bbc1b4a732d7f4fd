"""Builds an SAE from the settings of a job."""

from __future__ import annotations

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.planning.workload import Layout
from trainer.contract.settings import catalog
from trainer.contract.settings.transcoders import transcoder_problems
from trainer.saes.base import Sae


def build_sae(layout: Layout, d_in: int, d_out: int | None = None) -> Sae:
    """Build the job's SAE with zero weights; build a transcoder if `d_out` is given.

    Raise `UserError` for a transcoder that no export format supports.
    """
    job = layout.job
    for problem in transcoder_problems(job.sae, d_in, d_out):
        raise UserError(str(problem))
    entry = catalog.entry(catalog.ARCHITECTURES, job.sae.architecture, "sae.architecture")
    sae: Sae = entry.load()(d_in, job.sae.width(d_in), d_out, **msgspec.structs.asdict(job.sae.settings))
    if job.sae.skip:
        sae.add_skip()
    if job.data.scales_dimensions:
        sae.scale_dimensions()
    sae.dead_after_tokens = layout.dead_after_tokens
    return sae

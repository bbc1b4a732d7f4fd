"""Builds an SAE from a job's settings."""

from __future__ import annotations

from trainer.contract.errors import UserError
from trainer.contract.planning.workload import Layout
from trainer.contract.settings import catalog
from trainer.contract.settings.transcoders import transcoder_problems
from trainer.saes.base import Sae, SaeSpec


def build_sae(layout: Layout, d_in: int, d_out: int | None = None, n_targets: int = 1) -> Sae:
    """Build a job's SAE, or its transcoder if `d_out` is given, with all weights set to zero.

    The latents of a layer of a cross-layer transcoder write to `n_targets` layers.

    Raise `UserError` for a transcoder that no export format supports.
    """
    job, sae = layout.job, layout.job.sae
    for problem in transcoder_problems(sae, d_in, d_out):
        raise UserError(str(problem))
    entry = catalog.entry(catalog.ARCHITECTURES, sae.architecture, "sae.architecture")
    spec = SaeSpec(
        d_in,
        sae.width(d_in),
        sae.settings,
        d_out,
        has_skip=sae.skip,
        scales_dimensions=job.data.scales_dimensions,
        n_parts=job.data.n_parts,
        n_targets=n_targets,
        dead_after_tokens=layout.dead_after_tokens,
    )
    built: Sae = entry.load()(spec)
    return built

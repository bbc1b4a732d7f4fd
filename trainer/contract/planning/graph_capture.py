"""Decides whether steps on a GPU use CUDA graphs.

A step uses a graph if launching the step on the host would take longer than executing it on the GPU.
"""

from __future__ import annotations

from trainer.contract.planning import latent_capacity
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.model_source import ModelSettings

# The maximum GPU time in seconds for a captured step, and the assumed FLOP/s and bytes per second. A fast host launches
# a step in 2 ms; a virtual machine with an H200 took 7 to 12 ms. The assumed speeds roughly match an A100. A faster GPU
# gains more from capture, and a slower GPU loses nothing.
LONGEST_S, PRODUCTS, BANDWIDTH = 20e-3, 400e12, 2e12
# Bytes moved per weight, for the weight itself, its moments, its gradient and its 16-bit copy.
BYTES_PER_WEIGHT = 36


def pays(layout: Layout, d_in: int, d_out: int, *, precision: str) -> bool:
    """Return whether capturing a CUDA graph is worthwhile; capture is possible only with one SAE on one GPU.

    A step can be captured only if the host does not need the results of the previous step. Steps are not captured in
    runs that must resume bit-identically.
    """
    job = layout.job
    is_alone = layout.ranks == 1 and layout.mode == "single" and layout.micro_batches == 1 and len(layout.members) == 1
    if not is_alone or job.train.deterministic or precision not in ("bf16", "fp16") or not can_be_recorded(job, d_in):
        return False
    n_weights = (d_in + d_out) * job.sae.width(d_in)
    product_s = 2 * layout.micro_batch * d_in * job.sae.width(d_in) / PRODUCTS
    return product_s + BYTES_PER_WEIGHT * n_weights / BANDWIDTH < LONGEST_S


def can_be_recorded(job: JobConfig, d_in: int) -> bool:
    """Return whether steps will eventually activate only a few latents and no language model runs on the GPU."""
    is_dense = ARCHITECTURES[job.sae.architecture].dense_matrices
    is_sparse = not is_dense or latent_capacity.per_token(job.sae.settings.n_active, job.sae.width(d_in)) is not None
    runs_model = isinstance(job.data.settings, ModelSettings)
    return is_sparse and OPTIMIZERS[job.train.optimizer].writes_copies and not runs_model

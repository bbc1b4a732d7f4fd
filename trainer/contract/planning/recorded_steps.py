"""When a GPU's steps are recorded and replayed: where the host would take longer for a step than the GPU."""

from __future__ import annotations

from trainer.contract.planning import latent_room
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.model_source import ModelKnobs

# A fast host takes 2 ms for the launches of a step, the virtual one of an H200 took 7 to 12. Products and bytes per
# second are an A100's, about: a faster GPU is done sooner, so that it gains the more, and a slower one loses nothing.
LONGEST_S, PRODUCTS, BANDWIDTH = 20e-3, 400e12, 2e12
# Bytes that pass for each weight: weight and moments, gradient, 16-bit copy.
BYTES_PER_WEIGHT = 36


def pays(layout: Layout, d_in: int, d_out: int, *, precision: str) -> bool:
    """Tell whether the steps of a job's SAEs, on one GPU that has them to itself, are worth recording.

    Only those can be recorded in which the host need not know the GPU's numbers of the step before. A run that has to
    be the same to the last bit wherever it is resumed goes without.
    """
    job = layout.job
    is_alone = layout.ranks == 1 and layout.mode == "single" and layout.micro_batches == 1 and len(layout.members) == 1
    if not is_alone or job.train.deterministic or precision not in ("bf16", "fp16") or not can_be_recorded(job, d_in):
        return False
    n_weights = (d_in + d_out) * job.sae.width(d_in)
    product_s = 2 * layout.micro_batch * d_in * job.sae.width(d_in) / PRODUCTS
    return product_s + BYTES_PER_WEIGHT * n_weights / BANDWIDTH < LONGEST_S


def can_be_recorded(job: JobConfig, d_in: int) -> bool:
    """Tell whether a step keeps few latents, in the long run, and the host does nothing else that takes a GPU long."""
    is_dense = ARCHITECTURES[job.sae.architecture].dense_matrices
    is_sparse = not is_dense or latent_room.per_token(job.sae.knobs.n_active, job.sae.width(d_in)) is not None
    runs_model = isinstance(job.data.knobs, ModelKnobs)
    return is_sparse and OPTIMIZERS[job.train.optimizer].writes_copies and not runs_model

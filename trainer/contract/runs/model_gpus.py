"""Chooses, before the ranks start, which devices in an attempt only run the language model."""

from __future__ import annotations

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.planning.check_job import proposal_class
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.runs.resume import last_spec
from trainer.contract.settings.job import AnyJob


def with_model_placed(
    spec: RankSpec,
    job: AnyJob,
    device_name: str,
    box: MeasuredHardware,
    capacity: DeviceMemory,
    memory_of: str | None = None,
) -> RankSpec:
    """Return the spec with some devices reserved for the language model if that is faster or saves memory.

    In `spec`, every device in the job has a rank. A resumed run keeps its number of ranks if possible. See
    `place_model` for the other arguments.
    """
    if job.model_gpus == 0:
        return spec
    place = proposal_class(job).place_model
    placed = place(job, spec.n_devices, device_name, box, capacity, memory_of, _ranks_before(spec))
    if placed is None:
        return spec
    ranks = placed.devices - placed.model_gpus
    return msgspec.structs.replace(spec, world_size=ranks, model_gpus=placed.model_gpus, model_gpus_why=placed.why)


def _ranks_before(spec: RankSpec) -> int | None:
    """Return a resumed run's previous number of ranks, or None for a new run."""
    if spec.resume_from is None:
        return None
    try:
        return last_spec(spec.run_dir).world_size
    except UserError:
        return None

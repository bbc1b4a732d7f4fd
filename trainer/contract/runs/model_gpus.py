"""Chooses, before the ranks start, which devices of an attempt only run its language model."""

from __future__ import annotations

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.planning.forecast import DeviceMemory
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.planning.model_placement import place_model
from trainer.contract.planning.workload import model_gpus_of
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.runs.resume import last_spec
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import AnyJob


def with_model_placed(
    spec: RankSpec,
    job: AnyJob,
    device_name: str,
    box: MeasuredHardware,
    capacity: DeviceMemory,
    memory_of: str | None = None,
) -> RankSpec:
    """Return the spec with some devices reserved for the language model, if this is beneficial.

    In `spec`, every device of the job has a rank. A resumed run keeps its number of ranks if possible. For the other
    arguments see `place_model`.
    """
    if not isinstance(job, JobConfig) or model_gpus_of(job) == 0:
        return spec
    placed = place_model(
        job, job.data_shape(), spec.n_devices, device_name, box, capacity, memory_of, ranks_before=_ranks_before(spec)
    )
    ranks = placed.devices - placed.model_gpus
    return msgspec.structs.replace(spec, world_size=ranks, model_gpus=placed.model_gpus, model_gpus_why=placed.why)


def _ranks_before(spec: RankSpec) -> int | None:
    """Return the number of ranks of the run that is resumed, or None for a new run."""
    if spec.resume_from is None:
        return None
    try:
        return last_spec(spec.run_dir).world_size
    except UserError:
        return None

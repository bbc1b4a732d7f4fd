"""Chooses a job's GPUs: the fewest that suffice, or more if they pay off according to the cost model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.placement import of_one_vendor
from sae_tui.jobs.launch.ways import SAME_SIZE, Way, fewest, paying_more, why_not_more
from trainer.contract.errors import Problem, errors
from trainer.contract.planning.check_job import Machine, MachineGpu, UsedBefore, propose
from trainer.contract.settings.job import AnyJob
from trainer.contract.wording import duration, plural

# The settings that can rule out a number of GPUs, such as `parallel.latent_ranks = 3`, which rules out two.
_OF_COUNT = ("launch.gpus", "parallel.", "data.model_gpus", "train.batch_size", "train.global_batch_size")


class BestGpus(msgspec.Struct, frozen=True):
    """The best GPUs for a job now, and the reason. `gpus` is empty if the job has to wait for any `count` GPUs."""

    gpus: tuple[int, ...]
    count: int
    why: str

    @property
    def setting(self) -> list[int] | str:
        """The choice in the format of `launch.gpus`."""
        return list(self.gpus) or f"auto:{self.count}"


def best_gpus(
    job: AnyJob, machine: Machine, used_before: UsedBefore | None = None, *, several: bool = True
) -> BestGpus | None:
    """Return the best GPUs for a job, or None if it fits on none of them or a cluster chooses them.

    GPUs named in the job are ignored. If `several` is False, only one GPU is chosen. Raise `JobFileError` if the job's
    data cannot be read.
    """
    gpus = _offered(job, machine) if machine.gpus and not job.cluster else []
    rows = launch_kind(job.kind).ways(job, machine, gpus, _counts(gpus, several=several)) if gpus else []
    while rows:
        enough = fewest(rows)
        if not enough.fits:
            return None
        more = paying_more(enough, rows)
        chosen = more or enough
        if not refusal(job.replace("launch", gpus=list(chosen.gpus)), machine, used_before):
            return BestGpus(chosen.gpus if chosen.fits_now else (), chosen.ranks, _why(enough, more, rows))
        rows = [row for row in rows if row.ranks != chosen.ranks]
    return None


def _offered(job: AnyJob, machine: Machine) -> Sequence[MachineGpu]:
    """Return the usable GPUs of one vendor with known memory, in the order in which the job would get them.

    Slices are left out if there are also whole GPUs; if there are only slices, only one is returned.
    """
    known = [gpu for gpu in propose(job, machine).gpus if gpu.memory_free_bytes is not None]
    gpus = of_one_vendor(known, len(known))
    return [gpu for gpu in gpus if not gpu.is_slice] or gpus[:1]


def _counts(gpus: Sequence[MachineGpu], *, several: bool) -> list[int]:
    """Return the GPU counts to compare: powers of two, all free GPUs, and the free GPUs of the largest size."""
    free = [gpu.memory_total_bytes or 0 for gpu in gpus if not gpu.busy]
    large = [size for size in free if size >= SAME_SIZE * max(free)]
    powers = [2**power for power in range(len(gpus).bit_length())]
    return sorted({1, *powers, *({len(free), len(large)} - {0})}) if several else [1]


def refusal(job: AnyJob, machine: Machine, used_before: UsedBefore | None = None) -> Problem | None:
    """Return why the job's own settings rule out its number of GPUs, or None if they do not."""
    # If PyTorch cannot use the GPUs, every number of GPUs would be ruled out, so ignore this problem here.
    able = msgspec.structs.replace(machine, cuda_problem="")
    problems = errors(propose(job, able, used_before).problems())
    return next((problem for problem in problems if problem.path.startswith(_OF_COUNT)), None)


def _why(enough: Way, more: Way | None, rows: Sequence[Way]) -> str:
    """Return a sentence like `1 GPU suffices; 2 GPUs would save 12 s`."""
    if more:
        return f"{plural(more.ranks, 'GPU')} take {duration(more.seconds)}, {more.speed_up:.1f}× the speed of one"
    suffices = "1 GPU suffices" if enough.ranks == 1 else f"it needs the memory of {enough.ranks} GPUs"
    waits = "" if enough.fits_now else "it waits for them" if enough.ranks > 1 else "it waits for one"
    return "; ".join(filter(None, (suffices, waits, why_not_more(enough, rows))))

"""Chooses the GPUs and the disk of a rented machine from a job's own estimate, and checks that the job fits."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainer.contract.errors import JobFileError, Problem, errors
from trainer.contract.planning.check_job import Machine, MachineGpu, Proposal, propose
from trainer.contract.planning.extraction import ExtractionProposal
from trainer.contract.planning.memory import checkpoint_bytes
from trainer.contract.planning.training import TrainingProposal
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.skypilot import RENTED_GPUS, RentedGpus, check_skypilot, wanted_kinds
from trainer.contract.wording import gibibytes

# The numbers of GPUs to try on each machine; clouds offer no others.
COUNTS = (1, 2, 4, 8)
# A kind that needs more GPUs than the best kind is offered up to this factor.
_MOST_TIMES = 2
# The share of a GPU's memory that a process can use.
_USABLE = 0.95
# The disk for the system image, PyTorch and its caches, and the smallest disk that all clouds offer, in GB.
_SYSTEM_GB, _LEAST_GB = 60, 100
# The number of checkpoints and SAEs that fit on the disk.
_KEPT_COPIES = 6


def check(job: AnyJob) -> list[Problem]:
    """Return all problems of a job on a rented machine that can be detected without contacting SkyPilot."""
    problems = check_skypilot(job)
    if not errors(problems):
        # Another check reports data that cannot be read.
        with contextlib.suppress(JobFileError):
            problems += gpu_problems(job)
    return problems


def gpu_problems(job: AnyJob) -> list[Problem]:
    """Return a problem if the job fits on no GPU that it may use, or if its memory is unknown and it names no GPU."""
    if job.on_cpu:
        return []
    wanted, fixed = wanted_kinds(job.launch.gpu_kinds), fixed_count(job)
    if not job.launch.gpu_kinds and _needs(job, wanted[-1], fixed or 1) is None:
        message = 'is missing, and the memory that this job needs is unknown; name the GPUs, like ["H100:1"]'
        return [Problem("launch.gpu_kinds", message)]
    # The job most probably fits on the largest kind, so that only one plan is made.
    largest_first = sorted(wanted, key=lambda kind: -RENTED_GPUS[kind.kind][0])
    if any(_fits(job, kind, kind.per_machine or fixed or COUNTS[-1]) for kind in largest_first):
        return []
    return [Problem("launch.gpu_kinds", _excess(job, wanted, fixed))]


def choose_gpus(job: AnyJob) -> list[RentedGpus]:
    """Return the kinds of GPU that the job fits on, with the number on each machine, the smallest first.

    Return [] for a job on the CPU. Raise `JobFileError` for the problems in `gpu_problems`.
    """
    if job.on_cpu:
        return []
    if problems := gpu_problems(job):
        raise JobFileError(problems)
    wanted, fixed = wanted_kinds(job.launch.gpu_kinds), fixed_count(job)
    fitting = [one for kind in wanted if (one := _smallest(job, kind, fixed))]
    most = _MOST_TIMES * min(one.per_machine or 1 for one in fitting)
    chosen = [one for one in fitting if (one.per_machine or 1) <= most or job.launch.gpu_kinds]
    return sorted(chosen, key=lambda one: (one.per_machine or 1, RENTED_GPUS[one.kind][0], one.kind))


def fixed_count(job: AnyJob) -> int | None:
    """Return the number of GPUs on each machine that `launch.gpus` requests, or None for "auto"."""
    gpus = job.launch.gpus
    if isinstance(gpus, list):
        return len(gpus)
    _, _, count = gpus.partition(":")
    return int(count) if count else None


def needs_bytes(job: AnyJob, gpus: RentedGpus) -> int | None:
    """Return the memory that the job needs on each GPU of this kind, or None if it is unknown."""
    return _needs(job, gpus, gpus.per_machine or 1)


def _smallest(job: AnyJob, kind: RentedGpus, fixed: int | None) -> RentedGpus | None:
    """Return the kind with the smallest number of GPUs on which the job fits, or None if there is none."""
    counts = [kind.per_machine or fixed or 0] if kind.per_machine or fixed else COUNTS
    return next((RentedGpus(kind.kind, count) for count in counts if _fits(job, kind, count)), None)


def _fits(job: AnyJob, kind: RentedGpus, count: int) -> bool:
    proposal = _proposal(job, kind, count)
    return not proposal.outlook.lack and not errors(proposal.memory_problems())


def _needs(job: AnyJob, kind: RentedGpus, count: int) -> int | None:
    return _proposal(job, kind, count).outlook.needs_bytes


def _proposal(job: AnyJob, kind: RentedGpus, count: int) -> Proposal[AnyJob]:
    """Plan the job as if all GPUs of all rented machines were in one machine; each GPU's need is the same."""
    gib, name = RENTED_GPUS[kind.kind]
    n_bytes, n_gpus = int(gib * 2**30 * _USABLE), count * job.launch.nodes
    gpus = tuple(MachineGpu(index, name, n_bytes, memory_total_bytes=n_bytes) for index in range(n_gpus))
    here = job.replace("launch", backend="local", nodes=1, gpus=f"auto:{n_gpus}")
    return propose(here, Machine(gpus, os.cpu_count() or 1, Path("/")))


def _excess(job: AnyJob, wanted: Iterable[RentedGpus], fixed: int | None) -> str:
    largest = max(wanted, key=lambda kind: RENTED_GPUS[kind.kind][0])
    count = largest.per_machine or fixed or COUNTS[-1]
    needs, gib = _needs(job, largest, count), RENTED_GPUS[largest.kind][0]
    which = f"the job needs {gibibytes(needs or 0)} on each of {count} GPUs, and {largest.kind} has {gib} GiB"
    return f"{which}; use larger GPUs, more GPUs or launch.nodes, or a smaller SAE"


def disk_gb(job: AnyJob, sources: Iterable[str]) -> int:
    """Return the disk that a rented machine needs, in GB: system, local input files, and the job's own files."""
    needed = _SYSTEM_GB + (1.1 * sum(map(size_of, sources)) + _written_bytes(job)) / 1e9
    return max(_LEAST_GB, 10 * math.ceil(needed / 10))


def _written_bytes(job: AnyJob) -> float:
    """Return the size of the checkpoints and the SAE, or of the extracted rows."""
    proposal = _proposal(job, RentedGpus("H200"), fixed_count(job) or 1)
    if isinstance(proposal, TrainingProposal):
        return _KEPT_COPIES * checkpoint_bytes(proposal.work)
    return (proposal.outlook.disk_bytes or 0) if isinstance(proposal, ExtractionProposal) else 0


def size_of(source: str) -> int:
    """Return the size of a file or folder in bytes, without following links in the folder."""
    if not os.path.isdir(source):
        return os.path.getsize(source)
    return sum(_size(entry) for folder, _, names in os.walk(source) for entry in _paths(folder, names))


def _paths(folder: str, names: Iterable[str]) -> Iterator[str]:
    return (os.path.join(folder, name) for name in names)


def _size(path: str) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0

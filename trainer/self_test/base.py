"""Code shared by all self-test parts: check results, learners and random rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.activations.batches import Batch
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.parallel.base import Parallel
from trainer.runtime.precision import resolve_precision, set_matmul_precision
from trainer.training.learner import Learner
from trainer.training.step import take_step

CPU = torch.device("cpu")


class Check(NamedTuple):
    """The result of one check: whether it passed, and the measured values."""

    part: str
    name: str
    ok: bool
    found: dict[str, Any]


class Size(NamedTuple):
    """The sizes of a training run small enough for a self-test."""

    d_in: int
    d_sae: int
    k: int
    batch_size: int


SMALL, TINY = Size(128, 2048, 16, 1024), Size(32, 256, 4, 256)


def job_of(size: Size, sae: dict[str, Any], train: dict[str, Any]) -> JobConfig:
    """Return a job of the given size, with the given settings in [sae] and [train] and defaults for all others."""
    sizes = {"d_sae": size.d_sae, "k": size.k}, {"batch_size": size.batch_size, "n_steps": 1000}
    job, problems = parse_job({"data": {"path": "unused"}, "sae": sizes[0] | sae, "train": sizes[1] | train})
    assert job is not None, problems
    return job


def learner_of(job: JobConfig, d_in: int, device: torch.device) -> Learner:
    """Return a learner on the device, and set the job's precision for all matmuls in this process."""
    set_matmul_precision(resolve_precision(job.train.precision, device))
    return Learner(job, d_in, None, Parallel(device))


def take(learner: Learner, number: int, x: Tensor) -> None:
    """Run step `number` on a batch of raw data [n_tokens, d_in]."""
    take_step([learner], Parallel(x.device), number, [Batch([(x, x)], len(x))])


def rows(n: int, d_in: int, seed: int = 0) -> Tensor:
    """Return rows [n, d_in] on the CPU, identical on all machines: sparse sums of fixed directions, plus noise."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.nn.functional.normalize(torch.randn(2 * d_in, d_in, generator=generator), dim=1)
    used = torch.rand(n, len(directions), generator=generator) < 12 / len(directions)
    sums = (used * torch.rand(used.shape, generator=generator)) @ directions
    return sums + 0.02 * torch.randn(n, d_in, generator=generator)


def let_some_die(learner: Learner) -> None:
    """Mark about 3 % of the latents as dead, so that AuxK is used."""
    silent = learner.sae.n_tokens_since_fired
    silent[: max(1, len(silent) // 32)] = 10**9
    learner.sae.note_since_fired(silent)

"""A job on its ranks: how its steps are divided and on what devices it computes; the basis of all estimates.

The SAEs of a sweep are parsed once, however many ways to train them are tried.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import msgspec

from trainer.contract.planning.hardware import CPU, auto_precision, usual_capability
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.settings.job import USUAL_BATCH, AnyJob, JobConfig, Train, dead_after
from trainer.contract.settings.job_file import members
from trainer.contract.settings.model_source import ModelSettings
from trainer.contract.settings.sources import DataShape

# Modes in which one process has all devices of a job.
ONE_PROCESS = ("dp", "spread")
# A run with fewer, larger steps learns less from the same tokens: see docs/quality.md.
LEAST_STEPS = 500
# Tokens of all ranks together. Gradients of fewer tokens are mostly noise, and the optimizer takes as long for them.
SMALLEST_STEP = 512
# Round batches up to a multiple of this; matrix products pad to it anyway.
BATCH_UNIT = 64
# Tokens per step below which the automatic learning rate falls, because gradients are noisier.
FULL_LR_TOKENS = 1024


class Layout(msgspec.Struct, frozen=True, dict=True):
    """A job on `ranks` ranks.

    A mode or batch size of "auto" counts as the plain one until it is settled.
    """

    job: JobConfig
    ranks: int

    @cached_property
    def members(self) -> dict[str, JobConfig]:
        """The jobs of a sweep by label; without a sweep the job itself, under ""."""
        return members(self.job)

    def on_data(self, shape: DataShape) -> Workload:
        """Return the same job on data of this shape."""
        work = Workload(self.job, self.ranks, shape)
        work.__dict__["members"] = self.members
        return work

    @property
    def mode(self) -> str:
        """The parallel mode; "auto" counts as "ddp", or on one rank as "single"."""
        if self.job.parallel.mode != "auto":
            return self.job.parallel.mode
        return "ddp" if self.ranks > 1 else "single"

    @property
    def model_gpus(self) -> int:
        """The number of separate GPUs that only run a language model; 0 while it is not settled."""
        asked = self.job.model_gpus
        return 0 if asked == "auto" else asked

    @property
    def latent_ranks(self) -> int:
        """The number of ranks that share one set of latents; each such group gets different tokens."""
        return {"tensor": self.ranks, "hybrid": self.job.parallel.latent_ranks}.get(self.mode, 1)

    @property
    def data_ranks(self) -> int:
        """The number of ranks, or groups of ranks that share the latents, with different tokens."""
        return 1 if self.mode == "sweep" else max(1, self.ranks // self.latent_ranks)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimiser step over all ranks."""
        return self.job.train.global_batch_size or self._own_batch * self.job.train.accumulate * self.data_ranks

    @property
    def micro_batches(self) -> int:
        """The number of forward and backward passes per optimiser step."""
        if not self.job.train.global_batch_size:
            return self.job.train.accumulate
        return -(-self.job.train.global_batch_size // (self._own_batch * self.data_ranks))

    @property
    def micro_batch(self) -> int:
        """Tokens of a rank in one of these passes, if ranks share evenly."""
        return -(-self.tokens_per_step // (self.micro_batches * self.data_ranks))

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.job.train.n_steps or -(-self.job.train.n_tokens // self.tokens_per_step)

    @property
    def total_tokens(self) -> int:
        """Tokens of the whole run; its last step is always complete."""
        return self.total_steps * self.tokens_per_step

    @property
    def dead_after_tokens(self) -> int:
        """The number of tokens without firing after which a latent counts as dead."""
        return self.dead_after(self.total_steps)

    def dead_after(self, steps: int) -> int:
        """Return the number of tokens without firing after which a latent counts as dead in a run of `steps` steps."""
        return dead_after(self.job.sae.dead_after_tokens, steps * self.tokens_per_step)

    @property
    def chooses_latents(self) -> bool:
        """Whether it is a kind of TopK; the recipe for short runs was tuned for these.

        Other architectures steer their L0 by a penalty, and need more steps at the full rate than a short run has: with
        that recipe jumprelu reached an L0 of 58 instead of 32.
        """
        return not ARCHITECTURES[self.job.sae.architecture].dense_matrices

    @property
    def lr_scale(self) -> float:
        """The factor on the learning rate that `lr_scaling` gives for the tokens of a step."""
        train, tokens = self.job.train, self.tokens_per_step
        if train.lr_scaling == "auto":
            falls = train.lr == "auto" and self.chooses_latents
            return min(1.0, math.sqrt(tokens / FULL_LR_TOKENS)) if falls else 1.0
        ratio = tokens / train.lr_tokens
        return {"off": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[train.lr_scaling]

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether every SAE's optimizer can step part of a matrix without the rest."""
        return all(OPTIMIZERS[member.train.optimizer].elementwise for member in self.members.values())

    @property
    def members_by_rank(self) -> list[dict[str, JobConfig]]:
        """Each rank's SAEs by label: all of them, or under "sweep" each SAE on one rank, widest first to the least
        loaded.
        """
        if self.mode != "sweep":
            return [self.members] * self.ranks
        of_ranks: list[dict[str, JobConfig]] = [{} for _ in range(self.ranks)]
        loads = [0] * self.ranks
        for label, member in sorted(self.members.items(), key=lambda item: -item[1].sae.width(1000)):
            rank = loads.index(min(loads))
            loads[rank] += member.sae.width(1000)
            of_ranks[rank][label] = member
        return of_ranks

    def uses_zero(self, train: Train) -> bool:
        """Return whether ZeRO-1 shards this optimizer's state: if elementwise and without averages of the weights."""
        entry = OPTIMIZERS[train.optimizer]
        return self.job.parallel.zero and entry.elementwise and not entry.averages

    @property
    def _own_batch(self) -> int:
        asked = self.job.train.batch_size
        return self._auto_batch if asked == "auto" else asked

    @property
    def _auto_batch(self) -> int:
        """The most tokens per step that give a run `LEAST_STEPS`, if its length is set in tokens."""
        train = self.job.train
        if train.n_steps or train.global_batch_size or not self.chooses_latents:
            return USUAL_BATCH
        parts = train.accumulate * self.data_ranks * BATCH_UNIT
        units = max(train.n_tokens // (LEAST_STEPS * parts), -(-SMALLEST_STEP // parts))
        return min(units * BATCH_UNIT, USUAL_BATCH)


def steps_of(job: JobConfig, devices: int) -> int:
    """Return the optimiser steps of a whole training."""
    return Layout(job, ranks_of(job, devices)).total_steps


def ranks_of(job: AnyJob, devices: int) -> int:
    """Return how many of its devices a job trains on: all except the GPUs that only run its language model.

    If the job leaves that open, all of them: wherever the model then runs, a step has the tokens of that many ranks.
    """
    asked = job.model_gpus
    return devices if asked == "auto" else max(1, devices - asked)


def with_model_gpus(job: JobConfig, devices: int, model_gpus: int) -> JobConfig:
    """Return the job with `model_gpus` of its devices reserved for its language model.

    If the job left that open, its steps keep the tokens that they have without reserved GPUs; see `ranks_of`.
    """
    settings = job.data.settings
    if not isinstance(settings, ModelSettings) or settings.model_gpus == model_gpus:
        return job
    placed = job.replace("data", settings=msgspec.structs.replace(settings, model_gpus=model_gpus))
    if settings.model_gpus != "auto" or not model_gpus:
        return placed
    return placed.replace("train", global_batch_size=Layout(job, devices).tokens_per_step)


class Workload(Layout, frozen=True, dict=True):
    """A job on `ranks` devices called `device_name`, on data of this shape; "" is an ordinary GPU."""

    shape: DataShape
    device_name: str = ""

    @property
    def device(self) -> str:
        """The type of device, "cuda" or "cpu"."""
        return "cpu" if self.device_name == CPU else "cuda"

    @property
    def precision(self) -> str:
        """The dtype of the matrix products."""
        asked = self.job.train.precision
        return auto_precision(self.device, usual_capability(self.device_name)) if asked == "auto" else asked

    @property
    def product_bytes(self) -> int:
        """Bytes per number in a matrix product."""
        return 2 if self.precision in ("bf16", "fp16") else 4

    @property
    def d_in(self) -> int:
        return self.shape.d_in

    @property
    def d_out(self) -> int:
        """Width of the reconstruction."""
        return self.shape.d_out or self.shape.d_in

    @property
    def narrowest(self) -> int:
        """Latents of the narrowest SAE."""
        return min(member.sae.width(self.d_in) for member in self.members.values())

    def on(self, ranks: int) -> Workload:
        """Return the same job on another number of ranks."""
        return self._copy(ranks=ranks)

    def on_device(self, device_name: str) -> Workload:
        """Return the same job on devices of another name."""
        return self._copy(device_name=device_name)

    def with_settings(self, section: str, **changes: Any) -> Workload:
        """Return a copy with changed settings that all SAEs of a sweep share."""
        changed = self._copy(job=self.job.replace(section, **changes))
        changed.__dict__["members"] = {
            label: member.replace(section, **changes) for label, member in self.members.items()
        }
        return changed

    def _copy(self, **changes: Any) -> Workload:
        copied = msgspec.structs.replace(self, **changes)
        # The SAEs of a sweep do not depend on where they are trained.
        copied.__dict__["members"] = self.members
        return copied

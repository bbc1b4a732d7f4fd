"""How a job's steps are split across its ranks, and on which devices it runs: the basis for all estimates.

The settings of a sweep's SAEs are parsed only once, even if many training layouts are compared.
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

# Modes in which a single process uses all devices in a job.
ONE_PROCESS = ("dp", "spread")
# The minimum number of steps in a run. With fewer but larger steps, an SAE learns less from the same tokens; see
# docs/quality.md.
LEAST_STEPS = 500
# The minimum number of tokens per step, over all ranks. Gradients over fewer tokens are mostly noise, and the optimizer
# step takes just as long.
SMALLEST_STEP = 512
# Batch sizes are multiples of this number of tokens, because matmuls are padded to such multiples anyway.
BATCH_UNIT = 64
# With fewer tokens per step, the automatic learning rate is reduced, because gradients are noisier.
FULL_LR_TOKENS = 1024


class Layout(msgspec.Struct, frozen=True, dict=True):
    """A job and the number of ranks it is split across.

    Until a mode or batch size of "auto" is resolved, it stands for the plain mode or the default batch size.
    """

    job: JobConfig
    ranks: int

    @cached_property
    def members(self) -> dict[str, JobConfig]:
        """The jobs in a sweep, by label; without a sweep, the job itself with the label ""."""
        return members(self.job)

    def on_data(self, shape: DataShape) -> Workload:
        """Return the same job, on data with this shape."""
        work = Workload(self.job, self.ranks, shape)
        work.__dict__["members"] = self.members
        return work

    @property
    def mode(self) -> str:
        """The parallel mode; "auto" is treated as "ddp", or as "single" on one rank."""
        if self.job.parallel.mode != "auto":
            return self.job.parallel.mode
        return "ddp" if self.ranks > 1 else "single"

    @property
    def nodes(self) -> int:
        """The number of nodes on which a cluster's scheduler runs the job."""
        return self.job.launch.nodes if self.job.cluster else 1

    @property
    def model_gpus(self) -> int:
        """The number of separate GPUs that only run a language model; 0 while `auto` is not resolved."""
        asked = self.job.model_gpus
        return 0 if asked == "auto" else asked

    @property
    def latent_ranks(self) -> int:
        """The number of ranks sharing one set of latents; each such group of ranks gets different tokens."""
        return {"tensor": self.ranks, "hybrid": self.job.parallel.latent_ranks}.get(self.mode, 1)

    @property
    def data_ranks(self) -> int:
        """The number of ranks, or of groups of ranks sharing latents, that get different tokens."""
        return 1 if self.mode == "sweep" else max(1, self.ranks // self.latent_ranks)

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens per optimizer step, over all ranks."""
        return self.job.train.global_batch_size or self._own_batch * self.job.train.accumulate * self.data_ranks

    @property
    def micro_batches(self) -> int:
        """The number of forward and backward passes per optimizer step."""
        if not self.job.train.global_batch_size:
            return self.job.train.accumulate
        return -(-self.job.train.global_batch_size // (self._own_batch * self.data_ranks))

    @property
    def micro_batch(self) -> int:
        """The number of tokens per micro-batch on a rank, if all ranks get the same number."""
        return -(-self.tokens_per_step // (self.micro_batches * self.data_ranks))

    @property
    def total_steps(self) -> int:
        """The total number of optimizer steps in the run."""
        return self.job.train.n_steps or -(-self.job.train.n_tokens // self.tokens_per_step)

    @property
    def total_tokens(self) -> int:
        """The total number of tokens in the run; the last step is always complete."""
        return self.total_steps * self.tokens_per_step

    @property
    def dead_after_tokens(self) -> int:
        """The number of tokens after which a latent that has not fired is considered dead."""
        return self.dead_after(self.total_steps)

    def dead_after(self, steps: int) -> int:
        """Return `dead_after_tokens` for a run of `steps` steps."""
        return dead_after(self.job.sae.dead_after_tokens, steps * self.tokens_per_step)

    @property
    def chooses_latents(self) -> bool:
        """Whether the architecture is a TopK variant; the recipe for short runs was tuned for these variants.

        Other architectures control L0 with a penalty and need more steps at the peak learning rate than a short run
        provides. With the recipe for short runs, jumprelu reached an L0 of 58 instead of 32.
        """
        return not ARCHITECTURES[self.job.sae.architecture].dense_matrices

    @property
    def lr_scale(self) -> float:
        """The factor applied by `lr_scaling` to the learning rate for this number of tokens per step."""
        train, tokens = self.job.train, self.tokens_per_step
        if train.lr_scaling == "auto":
            falls = train.lr == "auto" and self.chooses_latents
            return min(1.0, math.sqrt(tokens / FULL_LR_TOKENS)) if falls else 1.0
        ratio = tokens / train.lr_tokens
        return {"off": 1.0, "sqrt": math.sqrt(ratio), "linear": ratio}[train.lr_scaling]

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether every SAE's optimizer can update one part of a matrix independently of the other parts."""
        return all(OPTIMIZERS[member.train.optimizer].elementwise for member in self.members.values())

    @property
    def members_by_rank(self) -> list[dict[str, JobConfig]]:
        """The SAEs on each rank, by label.

        In "sweep" mode, each SAE is on one rank: the widest SAEs are assigned first, each to the rank with the fewest
        latents. In all other modes, every rank has all SAEs.
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
        """Return whether ZeRO-1 shards the optimizer state.

        This requires `parallel.zero`, and an optimizer that is elementwise and does not average the weights.
        """
        entry = OPTIMIZERS[train.optimizer]
        return self.job.parallel.zero and entry.elementwise and not entry.averages

    @property
    def _own_batch(self) -> int:
        asked = self.job.train.batch_size
        return self._auto_batch if asked == "auto" else asked

    @property
    def _auto_batch(self) -> int:
        """The largest batch size for which a run whose length is given in tokens has at least `LEAST_STEPS` steps."""
        train = self.job.train
        if train.n_steps or train.global_batch_size or not self.chooses_latents:
            return USUAL_BATCH
        parts = train.accumulate * self.data_ranks * BATCH_UNIT
        units = max(train.n_tokens // (LEAST_STEPS * parts), -(-SMALLEST_STEP // parts))
        return min(units * BATCH_UNIT, USUAL_BATCH)


def steps_of(job: JobConfig, devices: int) -> int:
    """Return the total number of optimizer steps in a training job."""
    return Layout(job, ranks_of(job, devices)).total_steps


def ranks_of(job: AnyJob, devices: int) -> int:
    """Return the number of devices on which a job trains: all except the GPUs that only run its language model.

    If `model_gpus` is "auto", return the number of all devices: the number of tokens per step is based on it, even if
    some devices turn out to run only the model.
    """
    asked = job.model_gpus
    return devices if asked == "auto" else max(1, devices - asked)


def with_model_gpus(job: JobConfig, devices: int, model_gpus: int) -> JobConfig:
    """Return the job with `model_gpus` of its devices reserved for its language model.

    If the number was "auto", each step keeps the number of tokens that it has without reserved GPUs; see `ranks_of`.
    """
    settings = job.data.settings
    if not isinstance(settings, ModelSettings) or settings.model_gpus == model_gpus:
        return job
    placed = job.replace("data", settings=msgspec.structs.replace(settings, model_gpus=model_gpus))
    if settings.model_gpus != "auto" or not model_gpus:
        return placed
    return placed.replace("train", global_batch_size=Layout(job, devices).tokens_per_step)


class Workload(Layout, frozen=True, dict=True):
    """A job with its device name and data shape; an empty `device_name` means a typical GPU."""

    shape: DataShape
    device_name: str = ""

    @property
    def device(self) -> str:
        """The type of device, "cuda" or "cpu"."""
        return "cpu" if self.device_name == CPU else "cuda"

    @property
    def precision(self) -> str:
        """The matmul dtype."""
        asked = self.job.train.precision
        found = auto_precision(self.device, usual_capability(self.device_name)) if asked == "auto" else asked
        # The layers of a cross-layer transcoder share their errors, but not their loss scales.
        return "fp32" if found == "fp16" and self.job.n_layers > 1 else found

    @property
    def product_bytes(self) -> int:
        """The number of bytes per value in a matmul."""
        return 2 if self.precision in ("bf16", "fp16") else 4

    @property
    def d_in(self) -> int:
        return self.shape.d_in

    @property
    def d_out(self) -> int:
        """The width of the reconstructions."""
        return self.shape.d_out or self.shape.d_in

    @property
    def written_width(self) -> float:
        """The width of a decoder row, on average over the layers of a cross-layer transcoder.

        A latent writes to its own layer and to all later ones.
        """
        return self.d_out * (self.job.n_layers + 1) / 2

    @property
    def narrowest(self) -> int:
        """The number of latents in the narrowest SAE."""
        return min(member.sae.width(self.d_in) for member in self.members.values())

    def on(self, ranks: int) -> Workload:
        """Return the same job on a different number of ranks."""
        return self._copy(ranks=ranks)

    def on_device(self, device_name: str) -> Workload:
        """Return the same job on devices with a different name."""
        return self._copy(device_name=device_name)

    def with_settings(self, section: str, **changes: Any) -> Workload:
        """Return a copy with these settings changed for all SAEs in a sweep."""
        changed = self._copy(job=self.job.replace(section, **changes))
        changed.__dict__["members"] = {
            label: member.replace(section, **changes) for label, member in self.members.items()
        }
        return changed

    def _copy(self, **changes: Any) -> Workload:
        copied = msgspec.structs.replace(self, **changes)
        # The SAEs in a sweep do not depend on where they are trained.
        copied.__dict__["members"] = self.members
        return copied

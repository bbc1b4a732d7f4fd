"""The job as typed, frozen structs; each setting is declared once, with its default, help, unit and bounds."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from trainer.contract.errors import JobFileError, Problem
from trainer.contract.object_paths import absolute, is_url, real_paths
from trainer.contract.paths import shipped_data
from trainer.contract.printable import is_utf8
from trainer.contract.settings import all_layers
from trainer.contract.settings.architectures import ArchitectureSettings
from trainer.contract.settings.catalog import ARCHITECTURES, LAUNCH_BACKENDS, MIRRORS, NoSettings
from trainer.contract.settings.declare import about
from trainer.contract.settings.model_source import ModelSettings
from trainer.contract.settings.optimizers import OptimizerSettings
from trainer.contract.settings.promised import NO_PROMISES, Promises
from trainer.contract.settings.sources import DataShape, HoldOut, SourceSettings, StreamSettings, each
from trainer.contract.settings.typed import TIME_LIMITS

GPU_CHOICES = '"auto", "auto:2", "cpu", "cpu:2" or a list like [0, 1]'
MIRROR_LISTS = " or ".join(f'"{name}"' for name in MIRRORS) + ", or a list of them"
PYTHONS = 'the absolute path of a Python, like "/home/me/env/bin/python"'
# The number of tokens per rank and step if batch_size is "auto" and the run is long or its length is set in steps.
USUAL_BATCH = 4096
# Rows with a norm greater than this multiple of the median norm are left out. The norms of ordinary rows are at most
# three times the median, whereas the norms of a text's first tokens are up to a hundred times the median.
MAX_NORM = 10.0
Choice = str  # a key of a registry; checked against the registry at runtime, so new entries need no change here
# The maximum number of latents that `train.watch_latents` follows at once.
MOST_WATCHED = 32
# As a data path, this refers to the sample activations shipped with the app, unless a file or folder has this name.
SAMPLE = "sample"
J = TypeVar("J", bound="AnyJob")


class DataSettings(msgspec.Struct, frozen=True):
    """The `[data]` section: the source of the activations, and how rows are held out, left out or scaled."""

    settings: SourceSettings
    source: Annotated[Choice, about("Where activations come from.")] = "shards"
    held_out_tokens: (
        Annotated[
            int,
            about(
                "Approximate number of held-out rows for evaluation; auto: a 20th, at most 32,768.",
                unit="tokens",
                advanced=True,
                ge=0,
            ),
        ]
        | Literal["auto"]
    ) = "auto"
    hold_out: Annotated[
        HoldOut | Literal["auto"],
        about(
            "Holds out texts, blocks of 128 rows, or rows; auto: texts if known, rows if shuffled, else blocks.",
            advanced=True,
        ),
    ] = "auto"
    split_seed: Annotated[
        int, about("Seed of the choice of held-out rows; train.seed does not change it.", advanced=True, ge=0)
    ] = 0
    max_norm: Annotated[
        float,
        about(
            "Leaves out rows whose norm exceeds this multiple of the median norm; 0: only rows too large for fp32.",
            advanced=True,
            ge=0,
        ),
    ] = MAX_NORM
    drop_zero_rows: Annotated[bool, about("Leaves out rows of zeros, such as padding.", advanced=True)] = False
    drop_dimensions: (
        Annotated[
            list[Annotated[int, msgspec.Meta(ge=0)]],
            about(
                "Dimensions, counted from 0, that the SAE ignores and reconstructs with their mean, like [507].",
                advanced=True,
                wanted="a list of dimensions, counted from 0, like [507]",
            ),
        ]
        | None
    ) = None
    scale_dimensions: Annotated[
        Literal["auto", "off"],
        about(
            "auto: scales dimensions with a large spread down to 3 times the median spread.",
            advanced=True,
        ),
    ] = "off"

    @property
    def scales_dimensions(self) -> bool:
        """Whether dimensions may have individual scales; a dimension that is left out has the scale 0.

        Each part of a crosscoder's rows has its own scale.
        """
        return bool(self.drop_dimensions) or self.scale_dimensions == "auto" or self.n_parts > 1

    @property
    def n_parts(self) -> int:
        """The number of parts that a crosscoder's rows are joined from; 1 for other SAEs."""
        return len(self.settings.parts())

    @property
    def part_widths(self) -> tuple[int, ...]:
        """The widths of these parts, from the data's headers; empty if there is only one. May raise `JobFileError`."""
        return self.settings.shape().parts if self.n_parts > 1 else ()

    def held_out(self, n_tokens: int | None, world_size: int = 1) -> int:
        """Return how many of `n_tokens` rows (None for a stream) are held out: at least one per rank, or none."""
        most = 32_768 if n_tokens is None else min(n_tokens // 20, 32_768)
        wanted = most if self.held_out_tokens == "auto" else self.held_out_tokens
        return wanted if wanted >= world_size else 0


def dead_after(asked: int | Literal["auto"], total_tokens: int) -> int:
    """Return the number of tokens after which a latent that has not fired is dead.

    For "auto", this is 10 million, or 10 % of a short run.
    """
    return min(10_000_000, total_tokens // 10) if asked == "auto" else asked


_FROZEN = {"off": (), "decoder": ("W_dec",), "encoder": ("W_enc",), "both": ("W_enc", "W_dec")}


class SaeSettings(msgspec.Struct, frozen=True):
    """The `[sae]` section: the architecture, size and initialisation of the dictionary."""

    settings: ArchitectureSettings
    architecture: Annotated[Choice, about("Architecture of the SAE: how latents are made sparse.")] = "topk"
    d_sae: Annotated[int, about("Number of latents; overrides the expansion factor.", unit="latents", ge=1)] | None = (
        None
    )
    expansion_factor: Annotated[float, about("Latents per input dimension.", gt=0)] = 8.0
    b_dec_init: Annotated[
        Literal["geometric_median", "mean", "zeros"], about("Initial value of the decoder bias.", advanced=True)
    ] = "geometric_median"
    normalize: Annotated[
        Literal["mean_norm", "none"],
        about(
            "Scales inputs to a mean distance of √d_in from their mean; the scale is folded into the SAE.",
            advanced=True,
        ),
    ] = "mean_norm"
    encoder_init: Annotated[
        Literal["tied", "independent"],
        about("Whether the encoder starts as the transpose of the decoder.", advanced=True),
    ] = "tied"
    encoder_scale: (
        Annotated[float, about("Initial norm of the encoder's columns.", advanced=True, gt=0)] | Literal["auto"]
    ) = "auto"
    encoder_follows: Annotated[
        Literal["auto", "off"],
        about(
            "Ties encoder updates to decoder updates, at a fifth of lr; auto: TopK variants with Adam.", advanced=True
        ),
    ] = "auto"
    freeze: Annotated[
        Literal["off", "decoder", "encoder", "both"],
        about("Matrices that keep their random initial values, as a baseline (arXiv 2602.14111).", advanced=True),
    ] = "off"
    skip: Annotated[
        bool,
        about(
            "Adds a linear map from a transcoder's input to its output (arXiv 2501.18823); not for SAEs.", advanced=True
        ),
    ] = False
    cross_layer: Annotated[
        bool,
        about(
            "Trains the transcoders of several MLPs as one cross-layer transcoder: a layer's latents also write to all"
            " later MLP outputs.",
            advanced=True,
        ),
    ] = False
    dead_after_tokens: (
        Annotated[
            int,
            about(
                "A latent is dead if it has not fired for this many tokens, over all ranks.",
                unit="tokens",
                advanced=True,
                ge=1,
            ),
        ]
        | Literal["auto"]
    ) = "auto"
    resample_every_tokens: Annotated[
        int,
        about(
            "Tokens between two resamplings of dead latents, in the first half of a run; 0: never.",
            unit="tokens",
            advanced=True,
            ge=0,
        ),
    ] = 0

    @property
    def frozen(self) -> frozenset[str]:
        """The names of the weights that `freeze` keeps."""
        return frozenset(_FROZEN[self.freeze])

    def width(self, d_in: int) -> int:
        """Return the number of latents for this input dimension."""
        return self.d_sae or round(self.expansion_factor * d_in)


class Train(msgspec.Struct, frozen=True):
    """The `[train]` section: length, learning rate, precision and reporting."""

    settings: OptimizerSettings
    batch_size: (
        Annotated[
            int,
            about(
                "Tokens per data-parallel rank and micro-batch; auto: 4,096, or fewer if needed to reach 500 steps"
                " or to fit in memory.",
                unit="tokens",
                ge=1,
            ),
        ]
        | Literal["auto"]
    ) = "auto"
    global_batch_size: (
        Annotated[
            int,
            about(
                "Tokens per optimiser step over all ranks; overrides accumulate.", unit="tokens", advanced=True, ge=1
            ),
        ]
        | None
    ) = None
    accumulate: Annotated[int, about("Micro-batches per optimiser step.", advanced=True, ge=1)] = 1
    n_tokens: Annotated[int, about("Tokens to train on.", unit="tokens", ge=1)] = 2_000_000
    n_steps: Annotated[int, about("Optimiser steps; overrides n_tokens.", unit="steps", ge=1)] | None = None
    lr: (
        Annotated[float, about("Learning rate; auto: by optimizer, width and length of the run.", gt=0)]
        | Literal["auto"]
    ) = "auto"
    lr_scaling: Annotated[
        Literal["auto", "off", "sqrt", "linear"],
        about("Scales lr with the tokens per step; auto: by square root below 1,024, if lr is auto.", advanced=True),
    ] = "auto"
    lr_length: Annotated[
        Literal["auto", "off"],
        about("Lowers lr in long runs; auto: above 1,000 steps, if lr is auto.", advanced=True),
    ] = "auto"
    lr_tokens: Annotated[
        int, about("Reference tokens per step for train.lr_scaling.", unit="tokens", advanced=True, ge=1)
    ] = USUAL_BATCH
    optimizer: Annotated[Choice, about("Optimizer.", advanced=True)] = "adam"
    warmup_fraction: Annotated[
        float, about("Share of the steps over which lr rises from 0.", advanced=True, ge=0, le=1)
    ] = 0.0
    decay_fraction: (
        Annotated[
            float,
            about("Share of the steps, at the end, over which lr falls to 0.", advanced=True, ge=0, le=1),
        ]
        | Literal["auto"]
    ) = "auto"
    grad_clip: Annotated[float, about("Clips the global gradient norm to this value; 0: off.", advanced=True, ge=0)] = (
        1.0
    )
    precision: Annotated[
        Literal["auto", "fp32", "tf32", "bf16", "fp16"], about("Precision of the matmuls; weights stay fp32.")
    ] = "auto"
    seed: Annotated[int, about("Seed of the initial weights and the order of the data.", ge=0)] = 0
    random_twin: Annotated[
        bool,
        about(
            "Also trains each SAE with a frozen random decoder, to compare with;"
            ' short for sae.freeze = ["off", "decoder"].',
            advanced=True,
        ),
    ] = False
    halving: Annotated[
        bool,
        about(
            "Drops the worse SAEs of a sweep early, by the held-out FVU of cooled-down copies; for lists of learning"
            " rates and other learning settings.",
            advanced=True,
        ),
    ] = False
    log_every: Annotated[int, about("Logs metrics every N steps.", unit="steps", advanced=True, ge=1)] = 10
    eval_every: Annotated[
        int, about("Evaluates on held-out data every N steps; 0: only at the end.", unit="steps", ge=0)
    ] = 100
    checkpoint_every: Annotated[int, about("Checkpoint every N steps; 0: off.", unit="steps", advanced=True, ge=0)] = 0
    checkpoint_every_tokens: Annotated[
        int, about("Checkpoint every N tokens; 0: off.", unit="tokens", advanced=True, ge=0)
    ] = 0
    checkpoint_every_minutes: Annotated[
        float, about("Checkpoint every N minutes; 0: off.", unit="minutes", advanced=True, ge=0)
    ] = 10.0
    keep_checkpoints: Annotated[
        int, about("Number of newest checkpoints to keep, in addition to the best one.", advanced=True, ge=1)
    ] = 2
    report_card: Annotated[
        bool, about("Evaluates the SAE on held-out rows at the end and writes its report card.", advanced=True)
    ] = True
    watch_latents: (
        Annotated[
            list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | Literal["new", "dying"]],
            about(
                'Latents to follow during training, at each evaluation: numbers, "new" (came alive) or "dying".',
                advanced=True,
                wanted='a list of latents, "new" and "dying", like [12, 77, "new"]',
            ),
        ]
        | None
    ) = None
    mirror: (
        Annotated[
            str,
            about(
                "Copies the metrics, not the checkpoints, to other tools: tensorboard, wandb or trackio.",
                advanced=True,
                commas=True,
                wanted=MIRROR_LISTS,
            ),
        ]
        | list[str]
        | None
    ) = None
    mirror_checkpoints: (
        Annotated[
            str,
            about(
                "Uploads checkpoints and the finished SAE to hf://user/repo/folder, s3://bucket/folder, gs:// or"
                " file:///folder, from where another machine can resume the run.",
                advanced=True,
                min_length=1,
            ),
        ]
        | None
    ) = None
    mirror_every_minutes: Annotated[
        float,
        about(
            "Saves and uploads a checkpoint every N minutes to train.mirror_checkpoints; 0: uploads each checkpoint.",
            unit="minutes",
            advanced=True,
            ge=0,
        ),
    ] = 10.0
    deterministic: Annotated[
        bool, about("Bit-identical results: slower on a GPU, and work is not split by measured speeds.", advanced=True)
    ] = False

    @property
    def mirrors(self) -> list[str]:
        """The names of tools that also receive the metrics."""
        return [self.mirror] if isinstance(self.mirror, str) else self.mirror or []

    @property
    def saves_every_minutes(self) -> float:
        """The longest time between two checkpoints, which must be recent when they are mirrored; 0: no limit."""
        limits = [self.checkpoint_every_minutes, self.mirror_every_minutes if self.mirror_checkpoints else 0.0]
        return min(filter(None, limits), default=0.0)


class ParallelSettings(msgspec.Struct, frozen=True):
    """The `[parallel]` section: how the ranks share the work."""

    mode: Annotated[Choice, about('"auto": the fastest mode that fits, by a cost model of this machine.')] = "auto"
    latent_ranks: Annotated[
        int,
        about(
            "hybrid: number of ranks that shard the latents; the groups split the tokens.",
            advanced=True,
            ge=1,
        ),
    ] = 2
    shares: Annotated[
        str,
        about(
            'Share of tokens or latents per rank: "auto" (by speed), "even", or numbers like "3:2".',
            advanced=True,
            wanted='"auto", "even" or a number for each rank, like "3:2"',
            pattern=r"^(auto|even|[0-9]{1,9}(\.[0-9]{1,9})?(:[0-9]{1,9}(\.[0-9]{1,9})?)+)$",
        ),
    ] = "auto"
    rebalance: Annotated[bool, about("Rebalances the shares if a rank stays slow.", advanced=True)] = True
    gradients: Annotated[
        Literal["fp32", "bf16"], about("Type of the gradients sent between replicas.", advanced=True)
    ] = "fp32"
    zero: Annotated[
        bool, about("Shards the optimizer state and update over the replicas (ZeRO-1), if possible.", advanced=True)
    ] = True


class Launch(msgspec.Struct, frozen=True):
    """The `[launch]` section: where and how the job runs."""

    settings: msgspec.Struct = NoSettings()
    gpus: (
        Annotated[str, about("Devices: chosen automatically or by index, or CPU processes.", wanted=GPU_CHOICES)]
        | list[Annotated[int, msgspec.Meta(ge=0, le=9999)]]
    ) = "auto"
    backend: Annotated[
        Choice,
        about("Starts the processes: this machine, SLURM, or SkyPilot on rented machines.", advanced=True),
    ] = "local"
    nodes: Annotated[
        int,
        about(
            "SLURM, SkyPilot: number of nodes; launch.gpus is then per node.",
            unit="nodes",
            advanced=True,
            ge=1,
            le=9999,
        ),
    ] = 1
    partition: Annotated[str, about("SLURM: partition; empty: SLURM's default.", advanced=True)] | None = None
    account: Annotated[str, about("SLURM: the account to charge; empty: your default.", advanced=True)] | None = None
    time_limit: (
        Annotated[
            str,
            about(
                "Time limit, like 4:00:00 or 1-12; the job then stops. On SLURM, it saves two minutes earlier.",
                advanced=True,
                wanted=TIME_LIMITS,
            ),
        ]
        | None
    ) = None
    sbatch_options: (
        Annotated[
            list[str],
            about("SLURM: additional sbatch options.", advanced=True, wanted='a list like ["--qos=high", "--mem=64G"]'),
        ]
        | None
    ) = None
    gpu_kinds: (
        Annotated[
            list[str],
            about(
                "SkyPilot: GPUs to rent, any one of them; empty: the smallest that fit.",
                advanced=True,
                wanted='a list like ["H100", "A100-80GB:2"]',
            ),
        ]
        | None
    ) = None
    spot: Annotated[bool, about("SkyPilot: rents cheaper machines that the cloud may take back.", advanced=True)] = (
        False
    )
    infra: Annotated[str, about("SkyPilot: cloud, like aws or gcp/us-central1; empty: any.", advanced=True)] | None = (
        None
    )
    runs_url: (
        Annotated[str, about("SkyPilot: bucket for checkpoints, like s3://my-bucket/runs.", advanced=True)] | None
    ) = None
    package: (
        Annotated[
            str,
            about("SkyPilot: wheel or requirement to install there; empty: this version, from PyPI.", advanced=True),
        ]
        | None
    ) = None
    max_restarts: Annotated[int, about("Automatic restarts after a crash.", advanced=True, ge=0)] = 0
    max_requeues: Annotated[
        int,
        about(
            "SLURM: how often in a row a job is queued again after a node failure or a preemption.",
            advanced=True,
            ge=0,
        ),
    ] = 10
    priority: Annotated[int, about("Jobs with a higher priority start first.", advanced=True, ge=-100, le=100)] = 0
    share: Annotated[
        bool, about("Shares GPUs with other jobs and users if there is enough memory for all.", advanced=True)
    ] = False
    stalled_after_s: Annotated[
        float,
        about(
            "A job is considered stalled if it completes no step for this long, or for 10 × its median step time.",
            unit="s",
            advanced=True,
            gt=0,
        ),
    ] = 60.0
    end_stalled_after_s: Annotated[
        float, about("A job that stays stalled for this long is terminated; 0: never.", unit="s", advanced=True, ge=0)
    ] = 600.0
    python: (
        Annotated[
            str,
            about("Python of another environment to train with; empty: the app's.", advanced=True, wanted=PYTHONS),
        ]
        | None
    ) = None


# The setting that names the hooks; each SAE in a sweep reads the rows for one hook.
HOOK = "data.hook"
# The setting that combines the transcoders of all hooks into a cross-layer transcoder.
CROSS_LAYER = "sae.cross_layer"


class SweepAxis(msgspec.Struct, frozen=True):
    """A setting with several values; a sweep trains one SAE per value."""

    path: str
    values: tuple[Any, ...]


class AnyJob(msgspec.Struct, frozen=True, kw_only=True):
    """A complete job, with all defaults filled in; each kind of job in `KINDS` is a subclass."""

    # The name for this kind of job in job files, and the sections in its job files.
    kind: ClassVar[str]
    sections: ClassVar[Mapping[str, type[msgspec.Struct]]]
    # Whether the job writes rows that other jobs can read.
    writes_rows: ClassVar[bool] = False
    # Whether the job runs in the trainer, which needs PyTorch.
    needs_trainer: ClassVar[bool] = True

    name: Annotated[str, about("Name of the job.", min_length=1, max_length=80)] = "job"
    launch: Launch = Launch()
    # The axes of a sweep. The sections contain the first value on each axis.
    sweep: tuple[SweepAxis, ...] = ()

    @classmethod
    def with_all_layers(cls, raw: Mapping[str, Any], bases: Sequence[Path]) -> Mapping[str, Any]:
        """Return the table from a job file, with each hook that names no layer replaced by one hook per layer."""
        return raw

    @classmethod
    def conflicts(cls, sections: Mapping[str, Any], raw: Mapping[str, Any]) -> list[Problem]:
        """Return problems with combinations of individually valid settings; invalid sections are None."""
        return []

    def with_paths(self: J, bases: Sequence[Path]) -> J:
        """Return the job with absolute paths, each resolved against the first of `bases` in which it exists."""
        return self

    def paths_read(self) -> list[tuple[str, str]]:
        """Return the settings containing a path to the job's input, as pairs (section, name)."""
        return []

    def promises(self, by: str) -> Promises:
        """Return the future contents of each folder that the job writes, by real path; `by` names the job."""
        return NO_PROMISES

    @property
    def exchanges(self) -> bool:
        """Whether the job's devices exchange tensors, or one process uses all devices."""
        return False

    @property
    def model_gpus(self) -> int | Literal["auto"]:
        """The number of GPUs that only run the language model."""
        return 0

    @property
    def stored_rows(self) -> str | None:
        """A description of the stored activations that the job reads; None if there are none."""
        return None

    @property
    def on_cpu(self) -> bool:
        """Whether the job explicitly requests CPU processes; "auto" may also choose the CPU."""
        return str(self.launch.gpus).startswith("cpu")

    @property
    def cluster(self) -> str:
        """The cluster scheduler, such as "SLURM"; "" if the job runs on this machine."""
        return LAUNCH_BACKENDS[self.launch.backend].cluster

    @property
    def folders_read(self) -> list[tuple[str, str]]:
        """The folders whose rows the job reads, as pairs (setting, real path)."""
        return []

    def replace(self: J, section: str, **changes: Any) -> J:
        """Return a copy with some fields in one section changed."""
        return msgspec.structs.replace(self, **{section: msgspec.structs.replace(getattr(self, section), **changes)})


def _conflicts_of_freeze(sae: SaeSettings | None, train: Train | None) -> list[Problem]:
    problems = []
    if sae and sae.freeze != "off" and sae.resample_every_tokens:
        message = f'replaces weights that sae.freeze = "{sae.freeze}" keeps; set it to 0'
        problems.append(Problem("sae.resample_every_tokens", message))
    if train and train.random_twin:
        message = 'needs SAEs that are trained in full; leave out sae.freeze, or set it to ["off", "decoder"]'
        problems.append(Problem("train.random_twin", message))
    return problems


def _conflicts_of_layers(sections: Mapping[str, Any]) -> list[Problem]:
    """Report the settings that a cross-layer transcoder does not support."""
    data, sae, train, parallel = (sections[name] for name in ("data", "sae", "train", "parallel"))
    if not (sae and sae.cross_layer):
        alone = "only the layers of a cross-layer transcoder can share k; leave it out"
        return [Problem("sae.share_k", alone)] if sae and getattr(sae.settings, "share_k", False) else []
    problems = []
    if not ARCHITECTURES[sae.architecture].crosses_layers:
        known = " or ".join(f'"{name}"' for name, entry in ARCHITECTURES.items() if entry.crosses_layers)
        message = f"cannot train a cross-layer transcoder; use {known}"
        problems.append(Problem("sae.architecture", message))
    given = {
        "sae.skip": sae.skip,
        "sae.freeze": sae.freeze != "off",
        "sae.resample_every_tokens": sae.resample_every_tokens,
        "data.drop_dimensions": data and data.drop_dimensions,
        "data.scale_dimensions": data and data.scale_dimensions != "off",
        "train.halving": train and train.halving,
        "train.random_twin": train and train.random_twin,
    }
    problems += [
        Problem(path, f"is not supported with {CROSS_LAYER}; leave it out") for path, one in given.items() if one
    ]
    if train and train.precision == "fp16":
        # Each layer has its own loss scale, but the layers share their errors.
        problems.append(Problem("train.precision", f'{CROSS_LAYER} needs "bf16", "tf32" or "fp32"'))
    if parallel and parallel.mode in ("sweep", "dp"):
        problems.append(Problem("parallel.mode", f'{CROSS_LAYER} needs "single", "ddp", "tensor", "hybrid" or "auto"'))
    return problems


def _conflicts_of_parts(data: DataSettings | None, sae: SaeSettings | None) -> list[Problem]:
    if data is None or sae is None or data.n_parts > 1 or getattr(sae.settings, "rank_by", "sae") == "sae":
        return []
    return [Problem("sae.rank_by", "only a crosscoder has parts to sum over; leave it out")]


class JobConfig(AnyJob, frozen=True, kw_only=True):
    """A complete training job, with all defaults filled in."""

    kind: ClassVar[str] = "train"
    sections: ClassVar[Mapping[str, type[msgspec.Struct]]] = {
        "data": DataSettings,
        "sae": SaeSettings,
        "train": Train,
        "parallel": ParallelSettings,
        "launch": Launch,
    }

    data: DataSettings
    sae: SaeSettings
    train: Train
    parallel: ParallelSettings = ParallelSettings()
    name: Annotated[str, about("Name of the job.", min_length=1, max_length=80)] = "sae"

    @classmethod
    def with_all_layers(cls, raw: Mapping[str, Any], bases: Sequence[Path]) -> Mapping[str, Any]:
        return all_layers.of_training(raw, bases)

    @classmethod
    def conflicts(cls, sections: Mapping[str, Any], raw: Mapping[str, Any]) -> list[Problem]:
        """Report settings that exclude each other, and a stream for which no run length is set."""
        problems = [*_conflicts_of_freeze(sections["sae"], sections["train"]), *_conflicts_of_layers(sections)]
        data = sections["data"]
        problems += _conflicts_of_parts(data, sections["sae"])
        is_stream = isinstance(data, DataSettings) and isinstance(data.settings, StreamSettings)
        if not is_stream or {"n_tokens", "n_steps"} & {*raw.get("train", {})}:
            return problems
        message = "is missing, but the data is an endless stream; set it or train.n_steps"
        return [*problems, Problem("train.n_tokens", message)]

    def with_paths(self, bases: Sequence[Path]) -> JobConfig:
        settings = self.data.settings
        written = {name: getattr(settings, name) for name in settings.paths}
        absolute = {name: _resolve_each(path, bases) for name, path in written.items() if path is not None}
        for name in settings.hub_paths:
            given = getattr(settings, name)
            there = [path if os.path.exists(path := _resolve(one, bases)) else one for one in each(given)]
            absolute[name] = there[0] if isinstance(given, str) else there
        return self.replace("data", settings=msgspec.structs.replace(settings, **absolute))

    def paths_read(self) -> list[tuple[str, str]]:
        return [("data", name) for name in self.data.settings.paths]

    @property
    def exchanges(self) -> bool:
        return True

    @property
    def model_gpus(self) -> int | Literal["auto"]:
        return self.data.settings.model_gpus if isinstance(self.data.settings, ModelSettings) else 0

    @property
    def folders_read(self) -> list[tuple[str, str]]:
        written = [(f"data.{name}", getattr(self.data.settings, name)) for name in self.data.settings.paths]
        return [(setting, real) for setting, paths in written for real in real_paths(each(paths or []))]

    @property
    def stored_rows(self) -> str | None:
        places_of = getattr(self.data.settings, "places_of", None)
        return None if places_of is None else str(places_of(0))

    def data_shape(self, promises: Promises = NO_PROMISES) -> DataShape:
        """Return the dimensions and the number of rows, from the headers of the data files.

        For folders in `promises`, the promised shapes are used. Raise `JobFileError` if the headers cannot be read or
        the shapes of several hooks differ.
        """
        shapes = {name: settings.shape_once_written(promises) for name, settings in self.hooks.items()}
        (first, shape), *others = shapes.items()
        for name, other in others:
            if other != shape:
                message = f"{name} has {other.words}, and {first} {shape.words}; train them in separate jobs"
                raise JobFileError([Problem(HOOK, message)])
        self._check_dropped(shape)
        self._check_watched(shape)
        return shape

    def _check_dropped(self, shape: DataShape) -> None:
        """Raise `JobFileError` if a dropped dimension does not exist, or if no dimension would be left."""
        dropped, d = self.data.drop_dimensions or [], min(shape.d_in, shape.d_out or shape.d_in)
        beyond = next((number for number in dropped if number >= d), None)
        if beyond is not None:
            message = f"there is no dimension {beyond}; give numbers from 0 to {d - 1}"
            raise JobFileError([Problem("data.drop_dimensions", message)])
        if len(set(dropped)) == d:
            raise JobFileError([Problem("data.drop_dimensions", "leaves out all dimensions; keep at least one")])

    def _check_watched(self, shape: DataShape) -> None:
        """Raise `JobFileError` if a watched latent does not exist, or if there are too many."""
        numbers = {one for one in self.train.watch_latents or [] if isinstance(one, int)}
        width, setting = self.sae.width(shape.d_in), "train.watch_latents"
        is_swept = any(axis.path in ("sae.d_sae", "sae.expansion_factor") for axis in self.sweep)
        if numbers and max(numbers) >= width and not is_swept:
            message = f"there is no latent {max(numbers)}; give numbers from 0 to {width - 1}"
            raise JobFileError([Problem(setting, message)])
        if len(numbers) > MOST_WATCHED:
            message = f"names {len(numbers)} latents, and at most {MOST_WATCHED} are watched; leave some out"
            raise JobFileError([Problem(setting, message)])

    @property
    def hooks(self) -> dict[str, SourceSettings]:
        """The data settings for each hook, by the hook's name in the job file, or "" if there is only one hook."""
        names = next((axis.values for axis in self.sweep if axis.path == HOOK), ())
        settings: Any = self.data.settings
        return {name: msgspec.structs.replace(settings, hook=name) for name in names} or {"": settings}

    @property
    def n_layers(self) -> int:
        """The number of layers of a cross-layer transcoder; 1 for other SAEs, and for one of its layers."""
        return len(self.hooks) if self.sae.cross_layer else 1

    @property
    def row_names(self) -> list[str]:
        """The names of the rows that are read: the hooks, or "" for the joined rows of a cross-layer transcoder."""
        return [""] if self.n_layers > 1 else list(self.hooks)

    @property
    def part_widths(self) -> tuple[int, ...]:
        """The widths of the parts that rows are joined from; empty if there is only one. May raise `JobFileError`."""
        if self.n_layers == 1:
            return self.data.part_widths
        return tuple(settings.shape().d_in for settings in self.hooks.values())

    @property
    def hold_out(self) -> HoldOut:
        """The unit for holding out rows; "auto" is resolved from the shard headers. May raise `JobFileError`."""
        if self.data.hold_out != "auto":
            return self.data.hold_out
        usual = {settings.usual_hold_out() for settings in self.hooks.values()}
        return usual.pop() if len(usual) == 1 else "blocks"

    def hook_number(self, member: JobConfig) -> int:
        """Return the index of the hook whose rows an SAE in the sweep reads.

        All layers of a cross-layer transcoder read the same, joined rows.
        """
        return 0 if self.n_layers > 1 else self.layer_number(member)

    def layer_number(self, member: JobConfig) -> int:
        """Return the index of an SAE's hook among all hooks."""
        return list(self.hooks.values()).index(member.data.settings)


def _resolve_each(paths: str | list[str], bases: Sequence[Path]) -> str | list[str]:
    return _resolve(paths, bases) if isinstance(paths, str) else [_resolve(path, bases) for path in paths]


def _resolve(path: str, bases: Sequence[Path]) -> str:
    if is_url(path):
        return absolute(path, bases[0])
    candidates = [os.path.abspath(base / os.path.expanduser(path)) for base in bases]
    if wrong := next((candidate for candidate in candidates if not is_utf8(candidate)), None):
        raise JobFileError([Problem("data.path", f"leads to {wrong!a}, which is not UTF-8; rename that folder")])
    if path == SAMPLE:
        candidates.append(str(shipped_data() / SAMPLE))
        return next(filter(os.path.exists, candidates), candidates[-1])
    return next(filter(os.path.exists, candidates), candidates[0])

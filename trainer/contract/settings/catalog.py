"""THE REGISTRY of everything that a job file can name; classes are given as strings to avoid imports.

To add an architecture, an optimizer or a similar entry, write one new file and add one entry here. The launch form, the
command line and the checks then accept the new name.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.settings import architectures, model_source, optimizers, requests, sources

EntryKind = TypeVar("EntryKind", bound="Entry")


class Entry(msgspec.Struct, frozen=True):
    """A registered class, as `module:name`, and a sentence describing it."""

    target: str
    summary: str

    def load(self) -> Any:
        """Import the class; this is the only place where a name is resolved to code."""
        return pkgutil.resolve_name(self.target)


class SettingsEntry(Entry, frozen=True):
    """A registered class and its settings."""

    settings: type[msgspec.Struct]


class ArchitectureEntry(SettingsEntry, frozen=True):
    """An SAE architecture, and the facts about it that checks and estimates need."""

    settings: type[architectures.ArchitectureSettings]
    # Whether a file format for transcoders of this architecture exists: always, only for equal input and output
    # dimensions, or never.
    transcodes: Literal["yes", "one width", "no"] = "yes"
    # Whether latents are selected over the tokens of all ranks instead of per token.
    per_batch: bool = False
    # Whether encoder updates can be tied to decoder updates if the optimizer supports this.
    encoder_follows: bool = False
    # Whether `sae.cross_layer` is supported: `Sae.reconstruct` is called once, and decodes all latents.
    crosses_layers: bool = False
    # For an architecture that keeps all pre-activations on a GPU: the number of fp32 [n_tokens, d_sae] matrices at the
    # peak of a step, and the number of W_dec-sized matrices in addition to W_dec's gradient. Both numbers are 0 for an
    # architecture that selects latents. `pytest tests/trainer/test_memory_of_a_step.py -k ARCHITECTURE` measures the
    # first number.
    dense_matrices: float = 0
    dense_weights: float = 0
    # Curves that add no information: a loss that equals the FVU, or a fixed L0.
    redundant_curves: tuple[str, ...] = ()


class FollowingRates(msgspec.Struct, frozen=True):
    """Changes to an optimizer's learning rates if encoder updates are tied to decoder updates.

    `lr` is a factor for the optimizer's automatic learning rate. `encoder` is the encoder's learning rate relative to
    the decoder's. Both rates decay over the last fraction `decay` of a run.
    """

    lr: float
    encoder: float
    decay: float


class OptimizerEntry(SettingsEntry, frozen=True):
    """An optimizer, and the facts about it that checks and estimates need."""

    settings: type[optimizers.OptimizerSettings]
    # The number of state values per weight.
    state_values: int = 2
    # The memory that an optimizer step uses in addition to the state, as a multiple of the larger weight matrix.
    scratch: float = 0
    # Whether the averaged weights are saved instead of the trained weights.
    averages: bool = False
    # Whether updating a weight needs only that weight's gradient.
    elementwise: bool = True
    # Whether steps on a GPU also update the 16-bit weight copies for the matmuls.
    writes_copies: bool = False
    # The rates for tied updates; None if encoders are updated only with their own gradients.
    following: FollowingRates | None = None


class SourceEntry(SettingsEntry, frozen=True):
    """A source of activations."""

    settings: type[sources.SourceSettings]


class ModeEntry(Entry, frozen=True):
    """A way to distribute training over ranks."""


class FormatEntry(Entry, frozen=True):
    """An SAE file format used by a tool.

    `use` is the tool's code for loading a file. `is_read` and `is_written` say whether this program can import and
    export the format.
    """

    use: str
    is_read: bool = False
    is_written: bool = True


class MirrorEntry(Entry, frozen=True):
    """Another tool for viewing a run's metrics; `package` is the name used to import and install it."""

    package: str


class CurveAxis(msgspec.Struct, frozen=True):
    """The vertical axis for a curve: whether it starts at 0, and the smallest value allowed at its upper end."""

    from_zero: bool = True
    least_top: float = -math.inf


class Series(msgspec.Struct, frozen=True):
    """How one of a run's series of values is named, formatted, compared and displayed."""

    title: str
    # The name in the log, if it differs from the name in the store.
    short: str = ""
    # The unit after a value, such as "nats".
    unit: str = ""
    # Whether lower or higher values are better; None if neither.
    better: Literal["lower", "higher"] | None = None
    # The format in the log. Screens show four digits, or a percentage if this format is a percentage.
    format: str = ".4f"
    # The axis of the curve on the job screen; None if there is no curve. Curves appear in registry order.
    curve: CurveAxis | None = CurveAxis()
    # Where the series appears. A "minor" series is stored, and is compared only on request. A "result" also appears in
    # the log, the results and exported SAEs. A "key" series also appears in the progress bar and in the job list, where
    # jobs can be sorted by that series.
    prominence: Literal["key", "result", "minor"] = "key"

    @property
    def is_share(self) -> bool:
        """Whether values are fractions shown as percentages."""
        return self.format.endswith("%")


class MetricEntry(Entry, frozen=True):
    """An SAE metric, and whether it is also measured on held-out data."""

    series: Series
    held_out: bool = False


class NoSettings(msgspec.Struct, frozen=True):
    """The settings of an entry with no settings beyond those common to its section."""


class BackendEntry(SettingsEntry, frozen=True):
    """A way to start a job's ranks: a class that only the app loads, and the facts that other code needs."""

    # The scheduler that assigns nodes and GPUs, or "" if the app's own queue on this machine does so.
    cluster: str = ""
    # Whether that scheduler ends jobs at `launch.time_limit`; otherwise, the job's supervisor does.
    limits_time: bool = False
    # The function, as `module:function`, that returns a job's problems with this backend.
    check: str = ""
    # The function, as `module:function`, that cancels the remaining cluster jobs of an attempt, given the attempt's
    # folder. Only the app loads it.
    cancel: str = ""
    # The function, as `module:function`, that asks the scheduler when it would start a job. Only the app loads it.
    trial: str = ""
    # The class, as `module:class`, for attempts of a command; "" if this backend cannot run commands. Only the app
    # loads it.
    program: str = ""


class KindEntry(Entry, frozen=True):
    """A kind of job: its job file class and its other classes and functions, each as `module:name`."""

    # The `Proposal` class, for checking a job and estimating the resources that it needs.
    proposal: str
    # The `LaunchKind` class; the app uses it to describe, review and record a job.
    launch: str
    # Instructions for running a job file of this kind, for error messages.
    run_by: str
    # The `RankWork` class, for the work done by a rank; "" if the trainer does not run this kind of job.
    rank: str = ""
    # The function that `sae-train estimate` calls with a job.
    estimate: str = ""
    # The `AttemptRunner` class that the supervisor uses to run an attempt.
    runner: str = "sae_tui.jobs.supervisor.attempt:AttemptRunner"
    # Whether the job trains SAEs and therefore has metrics, checkpoints and report cards.
    trains: bool = False
    # Whether the job runs an arbitrary program: its metrics can have any name, a resumed job starts from the beginning,
    # and the program keeps running if its supervisor dies.
    is_program: bool = False
    # The unit of the job's progress, and the unit of its speed.
    unit: str = "step"
    rate: str = "steps/s"


ARCHITECTURES = {
    "topk": ArchitectureEntry(
        "trainer.saes.topk:TopK",
        "Exactly k active latents per token; AuxK revives dead latents.",
        architectures.TopKSettings,
        # These transcoders are written in the sparsify format because SAELens has no transcoders with k latents per
        # token.
        transcodes="one width",
        encoder_follows=True,
        crosses_layers=True,
        redundant_curves=("loss", "l0"),
    ),
    "hierarchical_topk": ArchitectureEntry(
        "trainer.saes.hierarchical_topk:HierarchicalTopK",
        "One SAE for many k: TopK that also reconstructs from the k / 2, k / 4, … largest latents.",
        architectures.HierarchicalTopKSettings,
        transcodes="one width",
        encoder_follows=True,
        redundant_curves=("l0",),
    ),
    "batch_topk": ArchitectureEntry(
        "trainer.saes.batch_topk:BatchTopK",
        "k active latents per token on average; a threshold at inference.",
        architectures.BatchTopKSettings,
        per_batch=True,
        encoder_follows=True,
        crosses_layers=True,
        redundant_curves=("loss",),
    ),
    "matryoshka_batch_topk": ArchitectureEntry(
        "trainer.saes.matryoshka:MatryoshkaBatchTopK",
        "BatchTopK in which prefixes of the latents also reconstruct on their own.",
        architectures.MatryoshkaSettings,
        per_batch=True,
        encoder_follows=True,
    ),
    "jumprelu": ArchitectureEntry(
        "trainer.saes.jumprelu:JumpReLU",
        "A learnt threshold per latent; the penalty is adjusted until L0 is k.",
        architectures.JumpReLUSettings,
        crosses_layers=True,
        dense_matrices=5.25,
    ),
    "gated": ArchitectureEntry(
        "trainer.saes.gated:Gated",
        "Separate paths decide which latents fire and how strongly; k on average.",
        architectures.GatedSettings,
        transcodes="no",
        dense_matrices=7.25,
    ),
    "standard": ArchitectureEntry(
        "trainer.saes.standard:Standard",
        "ReLU and an L1 penalty, adjusted so that k latents are active on average.",
        architectures.StandardSettings,
        dense_matrices=3,
        dense_weights=1,
    ),
}
OPTIMIZERS = {
    "adam": OptimizerEntry(
        "trainer.optimizers.adam:Adam",
        "Adam in one fused kernel.",
        optimizers.AdamSettings,
        writes_copies=True,
        # With these rates, the held-out FVU of a TopK SAE at MiniLM's last layer (k = 48, 6,144 latents) after 300
        # steps of 2,048 rows was 0.193. The FVU was 0.206 if the rate decayed only over the last fifth of the steps,
        # and 0.225 if the encoders were updated separately at half the rate. At SmolLM2's 12th block (k = 32, 4,608
        # latents), the FVU was 0.172 with tied updates and 0.182 without. The share of latents that never fired was 0.0
        # % instead of 3.0 % at MiniLM, and 0.1 % instead of 2.7 % at SmolLM2.
        following=FollowingRates(lr=2.0, encoder=0.2, decay=0.6),
    ),
    "signum": OptimizerEntry(
        "trainer.optimizers.signum:Signum",
        "Sign updates with averaged weights.",
        optimizers.SignumSettings,
        state_values=1,
        # The gradient signs need this memory if the update cannot be compiled.
        scratch=1,
        averages=True,
    ),
    "muon": OptimizerEntry(
        "trainer.optimizers.muon:Muon",
        "Orthogonalised momentum.",
        optimizers.MuonSettings,
        state_values=1,
        scratch=4,
        elementwise=False,
    ),
}
SOURCES = {
    "shards": SourceEntry("trainer.activations.shards:Shards", "Rows stored in files.", sources.ShardSettings),
    "requests": SourceEntry(
        "trainer.activations.requests:RequestRows",
        "Hidden states written by vLLM.",
        requests.RequestSettings,
    ),
    "synthetic": SourceEntry(
        "trainer.activations.synthetic:Synthetic", "Random sums of known features.", sources.SyntheticSettings
    ),
    "model": SourceEntry(
        "trainer.extraction.model_stream:ModelStream",
        "Rows computed by a language model while training.",
        model_source.ModelSettings,
    ),
}
PARALLEL = {
    "single": ModeEntry(
        "trainer.parallel.single:Single",
        "One process, one device.",
    ),
    "dp": ModeEntry(
        "trainer.parallel.dp:DataParallel",
        "Replicas in one process, if process groups fail; slower.",
    ),
    "ddp": ModeEntry(
        "trainer.parallel.grid:Grid",
        "A full replica on every device; gradients are averaged.",
    ),
    "tensor": ModeEntry(
        "trainer.parallel.grid:Grid",
        "Latents sharded over the devices, all with the same tokens.",
    ),
    "hybrid": ModeEntry(
        "trainer.parallel.grid:Grid",
        "Latents sharded over groups of devices, each group a replica.",
    ),
    "sweep": ModeEntry(
        "trainer.parallel.sweep:Sweep",
        "The SAEs of a sweep distributed over the devices; nothing is exchanged.",
    ),
}
METRICS = {
    "fvu": MetricEntry(
        "trainer.metrics.reconstruction:Fvu",
        "Fraction of variance unexplained.",
        Series("FVU", better="lower"),
        held_out=True,
    ),
    "explained_variance": MetricEntry(
        "trainer.metrics.reconstruction:ExplainedVariance",
        "Explained share of the variance; a constant error is ignored.",
        Series("explained variance", better="higher", curve=None, prominence="minor"),
    ),
    "l0": MetricEntry(
        "trainer.metrics.sparsity:L0",
        "Mean number of active latents per token.",
        # The settings determine L0, so neither direction is better.
        Series("L0", format=".1f"),
        held_out=True,
    ),
    "l1": MetricEntry(
        "trainer.metrics.sparsity:L1",
        "Mean sum of activations per token.",
        Series("L1", curve=None, prominence="minor"),
    ),
    "dead_fraction": MetricEntry(
        "trainer.metrics.dead:DeadFraction",
        "Share of latents that have not fired within the dead-latent window.",
        # The axis reaches at least 1 %, so that one dead latent among thousands does not look like a steep rise.
        Series("dead", "dead", better="lower", format=".1%", curve=CurveAxis(least_top=0.01), prominence="result"),
    ),
    "dense_fraction": MetricEntry(
        "trainer.metrics.sparsity:DenseLatents",
        "Share of latents that fire on more than a tenth of the tokens.",
        Series("dense fraction", curve=None, prominence="minor"),
    ),
}
# The kinds of job; a job file without `kind` describes a training job.
TRAINING = "train"
KINDS = {
    TRAINING: KindEntry(
        "trainer.contract.settings.job:JobConfig",
        "A training job, for `sae-tui launch` and `sae-train run`. `kind` may be omitted.",
        proposal="trainer.contract.planning.training:TrainingProposal",
        rank="trainer.ranks.training_work:TrainingWork",
        estimate="trainer.measuring.estimate:estimate_training",
        launch="sae_tui.jobs.launch.kinds.training:LaunchTraining",
        run_by="a file without it describes a training job; run it with `sae-train run`",
        trains=True,
        rate="tok/s",
    ),
    "extract": KindEntry(
        "trainer.contract.settings.extract:ExtractJob",
        'An extraction job, with `kind = "extract"`, for `sae-tui launch` and `sae-train extract`.',
        proposal="trainer.contract.planning.extraction:ExtractionProposal",
        rank="trainer.ranks.extraction_work:ExtractionWork",
        estimate="trainer.measuring.estimate_extraction:ExtractionEstimate.of",
        launch="sae_tui.jobs.launch.kinds.extraction:LaunchExtraction",
        run_by="run it with `sae-train extract`",
        unit="row",
        rate="rows/s",
    ),
    "command": KindEntry(
        "trainer.contract.settings.command:CommandJob",
        'Any program, with `kind = "command"`, for `sae-tui launch` and `sae-tui run`.',
        proposal="trainer.contract.planning.command:CommandProposal",
        launch="sae_tui.jobs.launch.kinds.command:LaunchCommand",
        run_by="run it with `sae-tui launch`",
        runner="sae_tui.jobs.supervisor.program:ProgramRunner",
        is_program=True,
    ),
}
LAUNCH_BACKENDS = {
    "local": BackendEntry(
        "sae_tui.jobs.launchers.local:RankGroup",
        "Processes on this machine.",
        NoSettings,
        program="sae_tui.jobs.launchers.program:ProgramAttempt",
    ),
    "slurm": BackendEntry(
        "sae_tui.jobs.launchers.slurm:SlurmAttempt",
        "Batch job on nodes that SLURM chooses.",
        NoSettings,
        cluster="SLURM",
        limits_time=True,
        check="trainer.contract.settings.slurm:check_slurm",
        cancel="sae_tui.jobs.launchers.slurm:cancel_left_behind",
        trial="sae_tui.jobs.launchers.trial:would_start",
        program="sae_tui.jobs.launchers.slurm_program:SlurmProgram",
    ),
    "skypilot": BackendEntry(
        "sae_tui.jobs.launchers.skypilot:RentedAttempt",
        "Machines rented from a cloud through SkyPilot.",
        NoSettings,
        cluster="SkyPilot",
        check="trainer.contract.planning.rented_machine:check",
        cancel="sae_tui.jobs.launchers.skypilot:cancel_left_behind",
        program="sae_tui.jobs.launchers.skypilot:RentedAttempt",
    ),
}
# Tools that can also show a run's metrics.
MIRRORS = {
    "tensorboard": MirrorEntry(
        "trainer.reporting.mirrors.tensorboard:TensorBoard", "Event files in the run's folder.", "tensorboard"
    ),
    "wandb": MirrorEntry(
        "trainer.reporting.mirrors.wandb:WandB", "Weights & Biases; offline if you are not logged in.", "wandb"
    ),
    "trackio": MirrorEntry("trainer.reporting.mirrors.trackio:Trackio", "Trackio, on this machine.", "trackio"),
}
# File formats for sharing SAEs: the SAEs that each format supports, and how to load a file.
FORMATS = {
    "saelens": FormatEntry(
        "trainer.sharing.saelens:SaeLens",
        "all but TopK transcoders; cfg.json + sae_weights.safetensors",
        'SAE.load_from_disk("my-sae")',
        is_read=True,
    ),
    "sparsify": FormatEntry(
        "trainer.sharing.sparsify:Sparsify",
        "TopK of one width; cfg.json + sae.safetensors",
        'SparseCoder.load_from_disk("my-sae")',
        is_read=True,
    ),
    "dictionary_learning": FormatEntry(
        "trainer.sharing.dictionary_learning:DictionaryLearning",
        "every architecture, no transcoders; config.json + ae.pt",
        'load_dictionary("my-sae", "cpu")',
        is_read=True,
    ),
    "diffing-toolkit": FormatEntry(
        "trainer.sharing.diffing_toolkit:DiffingToolkit",
        "BatchTopK crosscoders with parts of one width; config.json + model.safetensors",
        'BatchTopKCrossCoder.from_pretrained("my-sae", from_hub=True)',
    ),
    "saelens-parts": FormatEntry(
        "trainer.sharing.saelens_parts:SaeLensParts",
        "each part of a crosscoder, to read its directions; part-N/cfg.json + sae_weights.safetensors",
        'SAE.load_from_disk("my-sae/part-1").W_dec',
    ),
    "circuit-tracer": FormatEntry(
        "trainer.sharing.circuit_tracer:CircuitTracer",
        "transcoders of one width, and cross-layer transcoders; config.yaml + a file or two per layer",
        "load_transcoder_set({0: file}, ...)",
        is_read=True,
    ),
    "gemma-scope": FormatEntry(
        "trainer.sharing.gemma_scope:GemmaScope",
        "import only: params.npz, or config.json + params.safetensors",
        "SAE.from_pretrained(release, sae_id)",
        is_read=True,
        is_written=False,
    ),
    "neuronpedia": FormatEntry(
        "trainer.sharing.neuronpedia:Neuronpedia",
        "max-activating examples, once `eval` has stored them; batch-N.json",
        "NeuronpediaDashboardBatch(**json.load(file))",
    ),
    "delphi": FormatEntry(
        "trainer.sharing.delphi:Delphi",
        "where latents fire in the run's texts; FIRST_LAST.safetensors + config.json",
        'LatentDataset("folder-of-my-sae", ..., modules=["my-sae"])',
    ),
}

READ_FORMATS = tuple(name for name, one in FORMATS.items() if one.is_read)
WRITTEN_FORMATS = tuple(name for name, one in FORMATS.items() if one.is_written)
# Help texts shared by both import commands.
WHERE_SAE = "folder or file of the SAE, or its name on the hub: OWNER/NAME/FOLDER"
SAES_CONFIG = "a setting that is missing or wrong in the SAE's files, like trainer.k=32; may be repeated"
EACH_PART = "; repeat it for the parts of a crosscoder, in order"
IS_TRANSCODER = "treat the SAE as a transcoder, if its files do not say so"


def entry(registry: Mapping[str, EntryKind], name: str, path: str) -> EntryKind:
    """Return the entry with this name; if the name is unknown, raise a `UserError` that names the setting `path`."""
    if name not in registry:
        raise UserError(f'{path} must be {_list_names(registry)}, not "{name}"')
    return registry[name]


def _list_names(registry: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in registry)

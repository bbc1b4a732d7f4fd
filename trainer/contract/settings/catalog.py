"""THE REGISTRY: what can be named in a job file, as strings, so that listing imports nothing.

A new architecture, optimizer or the like is one new file and one entry here; form, command line and checks pick it up.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.settings import architectures, model_source, optimizers, sources

EntryKind = TypeVar("EntryKind", bound="Entry")


class Entry(msgspec.Struct, frozen=True):
    """A registered class, as `module:name`, and a sentence that says what it is."""

    target: str
    summary: str

    def load(self) -> Any:
        """Import the class; the only place where a name becomes code."""
        return pkgutil.resolve_name(self.target)


class KnobsEntry(Entry, frozen=True):
    """A registered class that has settings: its keyword arguments."""

    knobs: type[msgspec.Struct]


class ArchitectureEntry(KnobsEntry, frozen=True):
    """An SAE architecture, and what the checks and estimates must know of it."""

    knobs: type[architectures.ArchitectureKnobs]
    # Whether a format for its transcoders exists, or one for those whose target is as wide as their input.
    transcodes: Literal["yes", "one width", "no"] = "yes"
    # Whether it chooses among the tokens of all ranks, not for each token.
    per_batch: bool = False
    # Whether the encoder of a latent may move with its decoder, where the optimizer has rates for that.
    encoder_follows: bool = False
    # Of one that keeps all pre-activations on a GPU: how many fp32 matrices [n_tokens, d_sae] a step holds at its peak,
    # and how many as large as W_dec beside its gradient; 0 where it chooses some latents.
    dense_matrices: float = 0
    dense_weights: float = 0
    # Curves without information: a loss that equals the FVU, an L0 that is fixed.
    redundant_curves: tuple[str, ...] = ()


class FollowingRates(msgspec.Struct, frozen=True):
    """How an optimizer's rates change where the encoder of a latent moves with its decoder.

    `lr` is a factor on the rate that it takes by itself, the encoder's own is `encoder` times the decoder's, and both
    fall over the last `decay` of a run.
    """

    lr: float
    encoder: float
    decay: float


class OptimizerEntry(KnobsEntry, frozen=True):
    """An optimizer, and what the checks and estimates must know of it."""

    knobs: type[optimizers.OptimizerKnobs]
    # How many values of state it keeps for each weight.
    state_values: int = 2
    # Memory of a step beside its state, as a multiple of the larger weight matrix.
    scratch: float = 0
    # Whether it saves averaged weights instead of those it steps.
    averages: bool = False
    # Whether the step of a weight needs only that weight's gradient.
    elementwise: bool = True
    # Whether its steps on a GPU also write the 16-bit copies of weights that products read.
    writes_copies: bool = False
    # None where encoders are stepped by their own gradients alone.
    following: FollowingRates | None = None


class SourceEntry(KnobsEntry, frozen=True):
    """A source of activations."""

    knobs: type[sources.SourceKnobs]


class ModeEntry(Entry, frozen=True):
    """A way to share a training over ranks."""


class FormatEntry(Entry, frozen=True):
    """A tool's format of an SAE; `use` says how the tool loads it, `is_read` and `is_written` what works here."""

    use: str
    is_read: bool = False
    is_written: bool = True


class MirrorEntry(Entry, frozen=True):
    """Another tool that shows a run's metrics; `package` is what it is imported and installed as."""

    package: str


class Axis(msgspec.Struct, frozen=True):
    """The vertical axis of a curve: whether it begins at 0, and a value up to which it goes at least."""

    from_zero: bool = True
    least_top: float = -math.inf


class Series(msgspec.Struct, frozen=True):
    """How values that a run has over its steps are called, written and judged, and where they are shown."""

    title: str
    # Its name in a line of the log, where that is not the one by which it is stored.
    short: str = ""
    # What stands behind a value: "nats".
    unit: str = ""
    # Which values are the better ones; None where neither are.
    better: Literal["lower", "higher"] | None = None
    # Of a value in the log. Screens write four digits, and a share of 1 in percent where the log does.
    format: str = ".4f"
    # None where a job's screen has no curve of it; the curves are in the order of the registry.
    curve: Axis | None = Axis()
    # "minor" is only stored, and compared where it is asked for; a "result" is in the log, the results and the exported
    # SAE; what is "key" is also in the progress bar, the list of jobs and its orders.
    prominence: Literal["key", "result", "minor"] = "key"

    @property
    def is_share(self) -> bool:
        """Whether a value is a share of 1, written in percent."""
        return self.format.endswith("%")


class MetricEntry(Entry, frozen=True):
    """A measure of an SAE, and whether it is measured on held-out data too."""

    series: Series
    held_out: bool = False


class NoKnobs(msgspec.Struct, frozen=True):
    """No settings beside those that all entries of a section have."""


class BackendEntry(KnobsEntry, frozen=True):
    """A way to start the ranks of a job: a class that only the app loads, and what everybody else must know of it."""

    # What gives out the nodes and their GPUs, by its name; "" where they are this machine's, by its queue.
    cluster: str = ""
    # `module:function` that returns what is wrong with a job for it.
    check: str = ""
    # `module:function` that ends what the cluster still has of an attempt, by the attempt's folder; the app loads it.
    cancel: str = ""


ARCHITECTURES = {
    "topk": ArchitectureEntry(
        "trainer.saes.topk:TopK",
        "Exactly k latents per token; dead ones revived by AuxK.",
        architectures.TopKKnobs,
        # sparsify's; SAELens knows none with k latents per token.
        transcodes="one width",
        encoder_follows=True,
        redundant_curves=("loss", "l0"),
    ),
    "batch_topk": ArchitectureEntry(
        "trainer.saes.batch_topk:BatchTopK",
        "k latents per token on average; outside training a threshold.",
        architectures.BatchTopKKnobs,
        per_batch=True,
        encoder_follows=True,
        redundant_curves=("loss",),
    ),
    "matryoshka_batch_topk": ArchitectureEntry(
        "trainer.saes.matryoshka:MatryoshkaBatchTopK",
        "BatchTopK whose first latents also reconstruct on their own.",
        architectures.MatryoshkaKnobs,
        per_batch=True,
        encoder_follows=True,
    ),
    "jumprelu": ArchitectureEntry(
        "trainer.saes.jumprelu:JumpReLU",
        "A learnt threshold for every latent; k on average by a steered penalty.",
        architectures.JumpReLUKnobs,
        dense_matrices=5.25,
    ),
    "gated": ArchitectureEntry(
        "trainer.saes.gated:Gated",
        "Which latents fire and how strongly are read apart; k on average.",
        architectures.GatedKnobs,
        transcodes="no",
        dense_matrices=7.25,
    ),
    "standard": ArchitectureEntry(
        "trainer.saes.standard:Standard",
        "ReLU and an L1 penalty, steered so that k latents are active on average.",
        architectures.StandardKnobs,
        dense_matrices=3,
        dense_weights=1,
    ),
}
OPTIMIZERS = {
    "adam": OptimizerEntry(
        "trainer.optimizers.adam:Adam",
        "Adam in one fused kernel.",
        optimizers.AdamKnobs,
        writes_copies=True,
        # Held-out FVU of TopK after 300 steps of 2,048 rows. MiniLM's last layer, k = 48, 6,144 latents: 0.193; 0.206
        # with a fall over the last fifth only; 0.225 where encoders also move alone, at half the rate. SmolLM2's 12th
        # block, k = 32, 4,608 latents: 0.172, not 0.182. Latents that never fire: 0.0 %, not 3.0 %; 0.1 %, not 2.7 %.
        following=FollowingRates(lr=2.0, encoder=0.2, decay=0.6),
    ),
    "signum": OptimizerEntry(
        "trainer.optimizers.signum:Signum",
        "Signs of gradients, weights averaged.",
        optimizers.SignumKnobs,
        state_values=1,
        # The gradient's signs, where the update cannot be compiled.
        scratch=1,
        averages=True,
    ),
    "muon": OptimizerEntry(
        "trainer.optimizers.muon:Muon",
        "Momentum made orthogonal.",
        optimizers.MuonKnobs,
        state_values=1,
        scratch=4,
        elementwise=False,
    ),
}
SOURCES = {
    "shards": SourceEntry("trainer.activations.shards:Shards", "Shards on disk, memory-mapped.", sources.ShardKnobs),
    "synthetic": SourceEntry(
        "trainer.activations.synthetic:Synthetic", "Made up from a known dictionary.", sources.SyntheticKnobs
    ),
    "model": SourceEntry(
        "trainer.extraction.model_stream:ModelStream",
        "From a language model as it reads, stored nowhere.",
        model_source.ModelKnobs,
    ),
}
PARALLEL = {
    "single": ModeEntry(
        "trainer.parallel.single:Single",
        "One process, one device.",
    ),
    "dp": ModeEntry(
        "trainer.parallel.dp:DataParallel",
        "Replicas in one process, where process groups fail; slower.",
    ),
    "ddp": ModeEntry(
        "trainer.parallel.grid:Grid",
        "A full replica on every device, gradients averaged.",
    ),
    "tensor": ModeEntry(
        "trainer.parallel.grid:Grid",
        "Latents dealt out over the devices, all with the same tokens.",
    ),
    "hybrid": ModeEntry(
        "trainer.parallel.grid:Grid",
        "Latents dealt out over some devices, replicas on the others.",
    ),
    "sweep": ModeEntry(
        "trainer.parallel.sweep:Sweep",
        "The SAEs of a sweep dealt out over the devices; nothing exchanged.",
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
        "Share of variance explained, constant errors aside.",
        Series("explained variance", better="higher", curve=None, prominence="minor"),
    ),
    "l0": MetricEntry(
        "trainer.metrics.sparsity:L0",
        "Mean active latents per token.",
        # The settings ask for it: neither less nor more of it is better.
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
        "Share of latents that have not fired within the tokens after which they count as dead.",
        # The axis goes up to 1 % at least: one dead latent of thousands must not look like a cliff.
        Series("dead", "dead", better="lower", format=".1%", curve=Axis(least_top=0.01), prominence="result"),
    ),
    "dense_fraction": MetricEntry(
        "trainer.metrics.sparsity:DenseLatents",
        "Share of latents that fire on more than a tenth of tokens.",
        Series("dense fraction", curve=None, prominence="minor"),
    ),
}
LAUNCH_BACKENDS = {
    "local": BackendEntry(
        "sae_tui.jobs.launchers.local:RankGroup",
        "Processes on this machine.",
        NoKnobs,
    ),
    "slurm": BackendEntry(
        "sae_tui.jobs.launchers.slurm:SlurmAttempt",
        "A batch job on nodes that SLURM chooses.",
        NoKnobs,
        cluster="SLURM",
        check="trainer.contract.settings.slurm:check_slurm",
        cancel="sae_tui.jobs.launchers.slurm:cancel_left_behind",
    ),
}
# Where a run's metrics can be seen too.
MIRRORS = {
    "tensorboard": MirrorEntry(
        "trainer.reporting.mirrors.tensorboard:TensorBoard", "Event files in the run's folder.", "tensorboard"
    ),
    "wandb": MirrorEntry(
        "trainer.reporting.mirrors.wandb:WandB", "Weights & Biases; offline where you are not logged in.", "wandb"
    ),
    "trackio": MirrorEntry("trainer.reporting.mirrors.trackio:Trackio", "Trackio, on this machine.", "trackio"),
}
# Formats in which an SAE is shared: what each holds, and how it is read.
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
    "circuit-tracer": FormatEntry(
        "trainer.sharing.circuit_tracer:CircuitTracer",
        "transcoders of one width; config.yaml + layer_N.safetensors",
        "load_transcoder_set({0: file}, ...)",
        is_read=True,
    ),
    "gemma-scope": FormatEntry(
        "trainer.sharing.gemma_scope:GemmaScope",
        "only read: params.npz, or config.json + params.safetensors",
        "SAE.from_pretrained(release, sae_id)",
        is_read=True,
        is_written=False,
    ),
    "neuronpedia": FormatEntry(
        "trainer.sharing.neuronpedia:Neuronpedia",
        "what latents fire on, once `eval` has stored it; batch-N.json",
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
# The help of both import commands.
WHERE_SAE = "folder or file of the SAE, or its name on the hub: OWNER/NAME/FOLDER"
SAES_CONFIG = "a setting that the SAE's own files lack or have wrong, like trainer.k=32; can be repeated"
IS_TRANSCODER = "the SAE is a transcoder, for files that do not say so"


def entry(registry: Mapping[str, EntryKind], name: str, path: str) -> EntryKind:
    """Return the entry of this name; raise `UserError` naming the setting `path` where it is unknown."""
    if name not in registry:
        raise UserError(f'{path} must be {_list_names(registry)}, not "{name}"')
    return registry[name]


def _list_names(registry: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in registry)

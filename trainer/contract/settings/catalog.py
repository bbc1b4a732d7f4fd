"""THE REGISTRY: what can be named in a job file, as strings, so that listing imports nothing.

A new architecture, optimizer or the like is one new file and one entry here; form, command line and checks pick it up.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.settings import architectures, optimizers, sources

EntryKind = TypeVar("EntryKind", bound="Entry")


class Entry(msgspec.Struct, frozen=True):
    """A registered class, as `module:name`, and a sentence that says what it is."""

    target: str
    summary: str

    def load(self) -> Any:
        """Import the class; the only place where a name becomes code."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


class KnobsEntry(Entry, frozen=True):
    """A registered class that has settings: its keyword arguments."""

    knobs: type[msgspec.Struct]


class ArchitectureEntry(KnobsEntry, frozen=True):
    """An SAE architecture, and what the checks and estimates must know of it."""

    knobs: type[architectures.ArchitectureKnobs]
    # Whether an export format for transcoders exists.
    transcodes: bool = True
    # Whether it chooses among the tokens of all ranks, not for each token.
    per_batch: bool = False
    # Of one that keeps all pre-activations on a GPU: how many fp32 matrices [n_tokens, d_sae] a step holds at its peak,
    # and how many as large as W_dec beside its gradient; 0 where it chooses some latents.
    dense_matrices: float = 0
    dense_weights: float = 0


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


class SourceEntry(KnobsEntry, frozen=True):
    """A source of activations."""

    knobs: type[sources.SourceKnobs]


class ModeEntry(Entry, frozen=True):
    """A way to share a training over ranks."""


class MetricEntry(Entry, frozen=True):
    """A measure of an SAE."""


ARCHITECTURES = {
    "topk": ArchitectureEntry(
        "trainer.saes.topk:TopK",
        "Exactly k latents per token; dead ones revived by AuxK.",
        architectures.TopKKnobs,
        transcodes=False,
    ),
    "batch_topk": ArchitectureEntry(
        "trainer.saes.batch_topk:BatchTopK",
        "k latents per token on average; outside training a threshold.",
        architectures.BatchTopKKnobs,
        per_batch=True,
    ),
    "matryoshka_batch_topk": ArchitectureEntry(
        "trainer.saes.matryoshka:MatryoshkaBatchTopK",
        "BatchTopK whose first latents also reconstruct on their own.",
        architectures.MatryoshkaKnobs,
        per_batch=True,
    ),
    "jumprelu": ArchitectureEntry(
        "trainer.saes.jumprelu:JumpReLU",
        "A learnt threshold for every latent; k on average by a steered penalty.",
        architectures.JumpReLUKnobs,
        dense_matrices=7,
    ),
    "gated": ArchitectureEntry(
        "trainer.saes.gated:Gated",
        "Which latents fire and how strongly are read apart; k on average.",
        architectures.GatedKnobs,
        transcodes=False,
        dense_matrices=7.25,
    ),
    "standard": ArchitectureEntry(
        "trainer.saes.standard:Standard",
        "ReLU and an L1 penalty, steered so that k latents are active on average.",
        architectures.StandardKnobs,
        dense_matrices=4,
        dense_weights=1,
    ),
}
OPTIMIZERS = {
    "adam": OptimizerEntry("trainer.optimizers.adam:Adam", "Adam in one fused kernel.", optimizers.AdamKnobs),
    "signum": OptimizerEntry(
        "trainer.optimizers.signum:Signum",
        "Signs of gradients, weights averaged.",
        optimizers.SignumKnobs,
        state_values=1,
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
    "shards": SourceEntry(
        "trainer.activations.shards:Shards", "Safetensors shards, memory-mapped.", sources.ShardKnobs
    ),
    "synthetic": SourceEntry(
        "trainer.activations.synthetic:Synthetic", "Made up from a known dictionary.", sources.SyntheticKnobs
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
    ),
    "explained_variance": MetricEntry(
        "trainer.metrics.reconstruction:ExplainedVariance",
        "Share of variance explained, constant errors aside.",
    ),
    "l0": MetricEntry(
        "trainer.metrics.sparsity:L0",
        "Mean active latents per token.",
    ),
    "l1": MetricEntry(
        "trainer.metrics.sparsity:L1",
        "Mean sum of activations per token.",
    ),
    "dead_fraction": MetricEntry(
        "trainer.metrics.dead:DeadFraction",
        "Share of latents that count as dead.",
    ),
    "dense_fraction": MetricEntry(
        "trainer.metrics.sparsity:DenseLatents",
        "Share of latents that fire on more than a tenth of tokens.",
    ),
}


def entry(registry: Mapping[str, EntryKind], name: str, path: str) -> EntryKind:
    """Return the entry of this name; raise `UserError` naming the setting `path` where it is unknown."""
    if name not in registry:
        raise UserError(f'{path} must be {_list_names(registry)}, not "{name}"')
    return registry[name]


def _list_names(registry: Iterable[str]) -> str:
    return " or ".join(f'"{name}"' for name in registry)

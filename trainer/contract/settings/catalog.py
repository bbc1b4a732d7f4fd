"""THE REGISTRY: what can be named in a job file, as strings, so that listing imports nothing.

A new architecture, optimizer or the like is one new file and one entry here; form, command line and checks pick it up.
"""

from __future__ import annotations

import importlib
from typing import Any

import msgspec

from trainer.contract.errors import UserError
from trainer.contract.settings import architectures, optimizers, sources


class Entry(msgspec.Struct, frozen=True):
    """A registry entry: its class as `module:name`, a summary, the struct of its settings, and facts for the checks."""

    target: str
    summary: str
    knobs: type[msgspec.Struct]
    # Of an architecture: whether an export format for transcoders exists.
    transcodes: bool = True
    # Of an architecture that keeps all pre-activations on a GPU: how many fp32 matrices [n_tokens, d_sae] a step holds
    # at its peak, and how many as large as W_dec beside its gradient; 0 where it chooses some latents.
    dense_matrices: float = 0
    dense_weights: float = 0
    # Of an architecture: whether it chooses among the tokens of all ranks, not for each token.
    per_batch: bool = False
    # Of an optimizer: memory of a step beside its state, as a multiple of the larger weight matrix.
    scratch: float = 0
    # Of an optimizer: how many values of state it keeps for each weight.
    state_values: int = 2
    # Of an optimizer: whether it saves averaged weights instead of those it steps.
    averages: bool = False
    # Of an optimizer: whether the step of a weight needs only that weight's gradient.
    steps_alone: bool = True

    def load(self) -> Any:
        """Import the class; the only place where a name becomes code."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


class NoKnobs(msgspec.Struct, frozen=True):
    """The settings of an entry that has none."""


ARCHITECTURES = {
    "topk": Entry(
        "trainer.saes.topk:TopK",
        "Exactly k latents per token; dead ones revived by AuxK.",
        architectures.TopKKnobs,
        transcodes=False,
    ),
    "batch_topk": Entry(
        "trainer.saes.batch_topk:BatchTopK",
        "k latents per token on average; outside training a threshold.",
        architectures.BatchTopKKnobs,
        per_batch=True,
    ),
    "matryoshka_batch_topk": Entry(
        "trainer.saes.matryoshka:MatryoshkaBatchTopK",
        "BatchTopK whose first latents also reconstruct on their own.",
        architectures.MatryoshkaKnobs,
        per_batch=True,
    ),
    "jumprelu": Entry(
        "trainer.saes.jumprelu:JumpReLU",
        "A learnt threshold for every latent; k on average by a steered penalty.",
        architectures.JumpReLUKnobs,
        dense_matrices=7,
    ),
    "gated": Entry(
        "trainer.saes.gated:Gated",
        "Which latents fire and how strongly are read apart; k on average.",
        architectures.GatedKnobs,
        transcodes=False,
        dense_matrices=7.25,
    ),
    "standard": Entry(
        "trainer.saes.standard:Standard",
        "ReLU and an L1 penalty, steered so that k latents are active on average.",
        architectures.StandardKnobs,
        dense_matrices=4,
        dense_weights=1,
    ),
}
OPTIMIZERS = {
    "adam": Entry("trainer.optimizers.adam:Adam", "Adam in one fused kernel.", optimizers.AdamKnobs),
    "signum": Entry(
        "trainer.optimizers.signum:Signum",
        "Signs of gradients, weights averaged.",
        optimizers.SignumKnobs,
        state_values=1,
        averages=True,
    ),
    "muon": Entry(
        "trainer.optimizers.muon:Muon",
        "Momentum made orthogonal.",
        optimizers.MuonKnobs,
        state_values=1,
        scratch=4,
        steps_alone=False,
    ),
}
SOURCES = {
    "shards": Entry("trainer.activations.shards:Shards", "Safetensors shards, memory-mapped.", sources.ShardKnobs),
    "synthetic": Entry(
        "trainer.activations.synthetic:Synthetic", "Made up from a known dictionary.", sources.SyntheticKnobs
    ),
}
PARALLEL = {
    "single": Entry("trainer.parallel.single:Single", "One process, one device.", NoKnobs),
    "dp": Entry(
        "trainer.parallel.dp:DataParallel", "Replicas in one process, where process groups fail; slower.", NoKnobs
    ),
    "ddp": Entry("trainer.parallel.grid:Grid", "A full replica on every device, gradients averaged.", NoKnobs),
    "tensor": Entry(
        "trainer.parallel.grid:Grid",
        "Latents dealt out over the devices, all with the same tokens.",
        NoKnobs,
    ),
    "hybrid": Entry(
        "trainer.parallel.grid:Grid", "Latents dealt out over some devices, replicas on the others.", NoKnobs
    ),
    "sweep": Entry(
        "trainer.parallel.sweep:Sweep", "The SAEs of a sweep dealt out over the devices; nothing exchanged.", NoKnobs
    ),
}
METRICS = {
    "fvu": Entry("trainer.metrics.reconstruction:Fvu", "Fraction of variance unexplained.", NoKnobs),
    "explained_variance": Entry(
        "trainer.metrics.reconstruction:ExplainedVariance",
        "Share of variance explained, constant errors aside.",
        NoKnobs,
    ),
    "l0": Entry("trainer.metrics.sparsity:L0", "Mean active latents per token.", NoKnobs),
    "l1": Entry("trainer.metrics.sparsity:L1", "Mean sum of activations per token.", NoKnobs),
    "dead_fraction": Entry("trainer.metrics.dead:DeadFraction", "Share of latents that count as dead.", NoKnobs),
    "dense_fraction": Entry(
        "trainer.metrics.sparsity:DenseLatents", "Share of latents that fire on more than a tenth of tokens.", NoKnobs
    ),
}


def entry(registry: dict[str, Entry], name: str, path: str) -> Entry:
    """Return the entry of this name; raise `UserError` naming the setting `path` where it is unknown."""
    if name not in registry:
        raise UserError(f'{path} must be {_list_names(registry)}, not "{name}"')
    return registry[name]


def _list_names(registry: dict[str, Entry]) -> str:
    return " or ".join(f'"{name}"' for name in registry)

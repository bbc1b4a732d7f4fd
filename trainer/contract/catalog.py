"""THE REGISTRY: what can be named in a job file, as strings, so that listing imports nothing.

One new thing is one new file and one entry here; form, command line and checks pick it up.
"""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import msgspec

from trainer.contract.knobs import about
from trainer.contract.problems import UserError


class Entry(msgspec.Struct, frozen=True):
    """One thing of the registry: where its class is, what it is, and the struct of its settings."""

    target: str
    summary: str
    knobs: type[msgspec.Struct]

    def load(self) -> Any:
        """Imports the class; the only place where a name becomes code."""
        module, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module), attribute)


class NoKnobs(msgspec.Struct, frozen=True):
    """For a thing without settings of its own."""


class TopKKnobs(msgspec.Struct, frozen=True):
    """TopK with AuxK (Gao et al. 2024, arXiv 2406.04093)."""

    k: Annotated[int, about("Latents active per token.", unit="latents", ge=1)] = 32
    k_aux: Annotated[int, about("Dead latents that try to explain the residual.", unit="latents", ge=1)] | None = None
    auxk_alpha: Annotated[float, about("Weight of the AuxK loss; 0 turns it off.", ge=0)] = 1 / 32
    dead_after_tokens: Annotated[
        int, about("A latent that has not fired for so long, over all ranks, counts as dead.", unit="tokens", ge=1)
    ] = 400_000


class ShardKnobs(msgspec.Struct, frozen=True):
    """Activations on disk."""

    path: Annotated[
        str, about("Folder or file of .safetensors shards with a tensor `activations` [n_tokens, d_in].", min_length=1)
    ]


ARCHITECTURES = {
    "topk": Entry("trainer.saes.topk:TopK", "Exactly k latents per token; dead ones revived by AuxK.", TopKKnobs),
}
SOURCES = {
    "shards": Entry("trainer.activations.shards:Shards", "Safetensors shards, memory-mapped.", ShardKnobs),
}
PARALLEL = {
    "single": Entry("trainer.parallel.single:Single", "One process, one device.", NoKnobs),
    "ddp": Entry("trainer.parallel.ddp:Ddp", "A full replica on every device, gradients averaged.", NoKnobs),
}
METRICS = {
    "fvu": Entry("trainer.metrics.reconstruction:Fvu", "Fraction of variance unexplained.", NoKnobs),
    "l0": Entry("trainer.metrics.sparsity:L0", "Mean active latents per token.", NoKnobs),
    "dead_fraction": Entry("trainer.metrics.dead:DeadFraction", "Share of latents that count as dead.", NoKnobs),
    "tokens_per_s": Entry("trainer.metrics.throughput:TokensPerSecond", "Tokens trained on per second.", NoKnobs),
}


def entry(registry: dict[str, Entry], name: str, path: str) -> Entry:
    """The entry of this name; `path` is the setting to name where it is unknown."""
    if name not in registry:
        raise UserError(f'{path} must be {_listed(registry)}, not "{name}"')
    return registry[name]


def _listed(registry: dict[str, Entry]) -> str:
    return " or ".join(f'"{known}"' for known in registry)

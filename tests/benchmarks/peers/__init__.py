"""A common interface for our trainer, other trainers and plain loops, so that benchmarks treat all of them equally.

Every recipe keeps the defaults of its library: learning rate, schedule, initial weights, normalisation, AuxK, clipping.
Two defaults are limited to a tenth of the run: warm-ups of 1,000 steps, because dictionary_learning rejects a warm-up
longer than the run, and the 1,000 steps that dictionary_learning waits before it estimates a threshold. Each library is
imported only by its own recipe.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from peers.base import Recipe, Seen, Setup
from peers.dictionary_learning import DictionaryLearningBatchTopK, DictionaryLearningMatryoshka, DictionaryLearningTopK
from peers.ours import Ours, OursBatchTopK, OursMatryoshka
from peers.plain import PlainDense, PlainSparse
from peers.saelens import SaeLensBatchTopK, SaeLensMatryoshka, SaeLensTopK
from peers.sparsify import Sparsify, SparsifyAdam

__all__ = ["RECIPES", "Ours", "Recipe", "Seen", "Setup", "available", "build"]

_KINDS: tuple[type[Recipe], ...] = (
    Ours,
    OursBatchTopK,
    OursMatryoshka,
    SaeLensTopK,
    SaeLensBatchTopK,
    SaeLensMatryoshka,
    Sparsify,
    SparsifyAdam,
    DictionaryLearningTopK,
    DictionaryLearningBatchTopK,
    DictionaryLearningMatryoshka,
    PlainSparse,
    PlainDense,
)
RECIPES = {kind.name: kind for kind in _KINDS}


def build(name: str, setup: Setup, sample: Tensor) -> Recipe:
    """Build a recipe in its initial state, with random numbers from `setup.seed`."""
    torch.manual_seed(setup.seed)
    torch.set_float32_matmul_precision("highest")
    return RECIPES[name](setup, sample)


def available(names: list[str]) -> list[str]:
    """Return the names of the recipes that can run; for each of the others, print what is missing."""
    lacking = {name: RECIPES[name].missing() for name in names}
    for name, lack in lacking.items():
        if lack:
            print(f"{name} is left out: {lack}", file=sys.stderr)
    return [name for name in names if not lacking[name]]

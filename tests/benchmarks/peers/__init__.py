"""Ours, other trainers and plain loops behind one interface, so that benchmarks treat them all alike.

Every recipe keeps its library's own defaults: learning rate, schedule, initial weights, normalisation, AuxK, clipping.
Two defaults cannot be kept in a short run, since dictionary_learning refuses a warm-up that outlasts it: warm-ups of
1,000 steps, and that library's 1,000 steps before it looks for a threshold, become a tenth of the run where that is
less. A library is imported only by its own recipe.
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
    """Build a recipe at its start, with the random numbers of `setup.seed`."""
    torch.manual_seed(setup.seed)
    torch.set_float32_matmul_precision("highest")
    return RECIPES[name](setup, sample)


def available(names: list[str]) -> list[str]:
    """Return the names of the recipes that can run; print one line with the missing requirement of each other one."""
    lacking = {name: RECIPES[name].missing() for name in names}
    for name, lack in lacking.items():
        if lack:
            print(f"{name}: left out, {lack}", file=sys.stderr)
    return [name for name in names if not lacking[name]]

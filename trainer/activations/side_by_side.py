"""Stored activations of several hooks, their rows side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.activations.base import IndexedSource, Indices, Pair
from trainer.contract.wording import join_words


class SideBySide(IndexedSource):
    """Sources of as many rows of one width, of which row i is row i of each: of one token, as an extraction writes it.

    Where they were written otherwise, each has an order of its own, which is as good to train on.
    """

    def __init__(self, sources: Sequence[IndexedSource]) -> None:
        self._sources, first = sources, sources[0]
        self.n_hooks, self.d_in, self.d_out, self.n_tokens = len(sources), first.d_in, first.d_out, first.n_tokens
        self.sizes, self.weights, self.meta = first.sizes, first.weights, first.meta
        self.place = join_words([one.place for one in sources])

    def of_hook(self, hook: int) -> IndexedSource:
        return self._sources[hook]

    def read_by_all_threads(self) -> None:
        for one in self._sources:
            one.read_by_all_threads()

    def rows(self, indices: Indices) -> Tensor:
        return torch.cat([one.rows(indices) for one in self._sources], dim=1)

    def pairs(self, indices: Indices) -> Pair:
        pairs = [one.pairs(indices) for one in self._sources]
        x = torch.cat([inputs for inputs, _ in pairs], dim=1)
        return x, x if self.d_out is None else torch.cat([targets for _, targets in pairs], dim=1)

    def name_of(self, index: int) -> str:
        return f"{self._sources[0].name_of(index)}, or of the same row of another hook"

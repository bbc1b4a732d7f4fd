"""Which rows are trained on, and which are kept back to measure on."""

from __future__ import annotations

import copy

import numpy as np

from trainer.activations.base import Indices


class Split:
    """Random rows are held out, the same for the same seed; the others are numbered from 0 without a gap.

    They are random, since rows lie in text order and the last of them would be of one text only.
    """

    def __init__(self, n_tokens: int, n_held_out: int, *seed: int) -> None:
        self.n_train = n_tokens - n_held_out
        # A stream of its own: the permutations of epochs are seeded by (seed, epoch).
        generator = np.random.default_rng((*seed, 2**32))
        self.held_out: Indices = np.sort(generator.choice(n_tokens, n_held_out, replace=False, shuffle=False))
        # Held-out row j lies after held_out[j] - j training rows.
        self._before = self.held_out - np.arange(n_held_out)

    def grown_to(self, n_tokens: int) -> Split:
        """Return the split of these rows and of more behind them, all of which are trained on."""
        grown = copy.copy(self)
        grown.n_train = n_tokens - len(self.held_out)
        return grown

    def rows(self, numbers: Indices) -> Indices:
        """Return the rows of some training numbers 0 .. n_train - 1."""
        return numbers + np.searchsorted(self._before, numbers, side="right")

    def sample(self, n: int, *seed: int) -> Indices:
        """Draw at most n training rows from everywhere: with rows of one place only, b_dec would be that text's own."""
        generator = np.random.default_rng(seed)
        return self.rows(generator.choice(self.n_train, min(n, self.n_train), replace=False, shuffle=False))

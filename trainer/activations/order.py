"""Which rows make up which batch."""

from __future__ import annotations

import functools

import numpy as np

from trainer.activations.base import Indices


class Order:
    """An endless sequence of epochs, each a seeded permutation of all tokens.

    A batch is a stretch of it, so the end of one epoch and the start of the next can share a batch and no token
    is lost; and a position in it is all that a checkpoint has to remember.
    """

    def __init__(self, n_tokens: int, seed: int) -> None:
        self._n_tokens = n_tokens
        self._seed = seed
        # Two, for the batch that spans an epoch's end; each takes 8 bytes per token.
        self._permutation = functools.lru_cache(maxsize=2)(self._shuffle)

    def stretch(self, start: int, length: int) -> Indices:
        """The row numbers at positions start .. start + length - 1."""
        pieces = []
        while length:
            epoch, offset = divmod(start, self._n_tokens)
            piece = self._permutation(epoch)[offset : offset + length]
            pieces.append(piece)
            start, length = start + len(piece), length - len(piece)
        return np.concatenate(pieces)

    def _shuffle(self, epoch: int) -> Indices:
        return np.random.default_rng((self._seed, epoch)).permutation(self._n_tokens)

"""Splits a step's tokens into micro-batches, and each micro-batch among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.parallel.latents import apportion


class TokenSlice(NamedTuple):
    """A rank's slice of a micro-batch: its offset in the step, its length, and the micro-batch's length."""

    start: int
    length: int
    of_all: int


class Cut:
    """The slices that rank `index` gets when a step of `n_tokens` is split into `n_parts` micro-batches.

    The rank gets its share of each micro-batch, but at least one token.
    """

    def __init__(self, n_tokens: int, n_parts: int = 1, shares: Sequence[float] = (1.0,), index: int = 0) -> None:
        self.n_tokens = n_tokens
        self.token_slices = tuple(_token_slices(n_tokens, n_parts, shares, index))

    @property
    def own_tokens(self) -> int:
        """This rank's number of tokens per step."""
        return sum(token_slice.length for token_slice in self.token_slices)

    @property
    def longest(self) -> TokenSlice:
        """This rank's longest slice of a micro-batch."""
        return max(self.token_slices, key=lambda token_slice: token_slice.length)

    @property
    def largest(self) -> int:
        """The number of tokens in this rank's longest slice."""
        return self.longest.length


def cut_within(n_tokens: int, n_parts: int, shares: Sequence[float], index: int, most: int | None) -> Cut:
    """Split a step into `n_parts` micro-batches, or into more if a rank's slice would exceed `most` tokens.

    All ranks compute the same split.
    """
    n_parts = max(1, min(n_parts, n_tokens // len(shares)))
    while most and n_parts < n_tokens // len(shares):
        largest = max(Cut(n_tokens, n_parts, shares, rank).largest for rank in range(len(shares)))
        if largest <= most:
            break
        n_parts += 1
    return Cut(n_tokens, n_parts, shares, index)


def _token_slices(n_tokens: int, n_parts: int, shares: Sequence[float], index: int) -> list[TokenSlice]:
    token_slices, start = [], 0
    for size in apportion(n_tokens, [1.0] * n_parts):
        lengths = [1 + more for more in apportion(size - len(shares), shares)]
        token_slices.append(TokenSlice(start + sum(lengths[:index]), lengths[index], size))
        start += size
    return token_slices

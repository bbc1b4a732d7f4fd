"""How the tokens of a step are cut: into micro-batches one after the other, and each of these over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trainer.parallel.latents import apportion


class Stretch(NamedTuple):
    """A rank's part of a micro-batch: where in the step it begins, its tokens, and those of all ranks."""

    start: int
    length: int
    of_all: int


class Cut:
    """A step of `n_tokens` in `n_parts` micro-batches; of each, rank `index` gets its share, at least one token."""

    def __init__(self, n_tokens: int, n_parts: int = 1, shares: Sequence[float] = (1.0,), index: int = 0) -> None:
        self.n_tokens = n_tokens
        self.stretches = tuple(_stretches(n_tokens, n_parts, shares, index))

    @property
    def own_tokens(self) -> int:
        """Tokens of this rank in a step."""
        return sum(stretch.length for stretch in self.stretches)

    @property
    def longest(self) -> Stretch:
        """This rank's part of its largest micro-batch."""
        return max(self.stretches, key=lambda stretch: stretch.length)

    @property
    def largest(self) -> int:
        """Tokens of this rank in its largest micro-batch."""
        return self.longest.length


def cut_within(n_tokens: int, n_parts: int, shares: Sequence[float], index: int, most: int | None) -> Cut:
    """Cut a step into `n_parts` micro-batches, or as many more as keep every rank's part within `most` tokens.

    All ranks cut alike.
    """
    n_parts = max(1, min(n_parts, n_tokens // len(shares)))
    while most and n_parts < n_tokens // len(shares):
        largest = max(Cut(n_tokens, n_parts, shares, rank).largest for rank in range(len(shares)))
        if largest <= most:
            break
        n_parts += 1
    return Cut(n_tokens, n_parts, shares, index)


def _stretches(n_tokens: int, n_parts: int, shares: Sequence[float], index: int) -> list[Stretch]:
    stretches, start = [], 0
    for size in apportion(n_tokens, [1.0] * n_parts):
        lengths = [1 + more for more in apportion(size - len(shares), shares)]
        stretches.append(Stretch(start + sum(lengths[:index]), lengths[index], size))
        start += size
    return stretches

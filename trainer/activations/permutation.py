"""Pseudorandom permutations of any number of rows; the image of each position is computed without a lookup table."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

# The smallest number of Feistel rounds that is secure in both directions (Luby & Rackoff 1988).
ROUNDS = 4
# With fewer runs, rows would be poorly mixed. Runs are then unnecessary anyway, because the rows fit in the page cache.
_FEWEST_RUNS = 1024


class Permutation:
    """A seeded bijection of 0 .. n - 1, computed by a Feistel network on pairs of numbers.

    The method is from "Ciphers with arbitrary finite domains" (Black & Rogaway 2002). Each position is split into two
    halves, and each round adds a hash of one half to the other. There are slightly more than n pairs, so an image of n
    or above is mapped again until it is below n. A shuffled list would take 8 bytes per row and would have to be
    computed at every start. For a billion rows, this would take 8 GB and many seconds.
    """

    def __init__(self, n: int, *seed: int) -> None:
        self._n = n
        root = math.isqrt(n - 1) + 1
        self._widths = np.array([root, -(-n // root)], np.uint64)
        self._keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: Indices) -> Indices:
        """Return the images of positions, each in [0, n)."""
        images = self._once(positions.astype(np.uint64))
        while (beyond := images >= self._n).any():
            images[beyond] = self._once(images[beyond])
        return images.view(np.int64)

    def _once(self, positions: Words) -> Words:
        changed, other = np.divmod(positions, self._widths[1])
        for number, key in enumerate(self._keys):
            width = self._widths[number % 2]
            changed += _below(other ^ key, width)
            # Reduce modulo the width. A negative difference wraps around to a huge number, so `minimum` ignores it.
            np.minimum(changed, changed - width, out=changed)
            changed, other = other, changed
        changed *= self._widths[1]
        changed += other
        return changed


class RunPermutation:
    """A seeded bijection of 0 .. n - 1 that keeps runs of neighbouring numbers together, in ascending order.

    The start of the first run is random, so that each seed groups different rows. If n is not a multiple of the run
    length, the leftover numbers come last.
    """

    def __init__(self, n: int, run: int, *seed: int) -> None:
        self._n, self._run, self._n_whole = n, run, n // run * run
        self._runs = Permutation(n // run, *seed)
        self._begin = int(np.random.default_rng(seed).integers(n))

    def __call__(self, positions: Indices) -> Indices:
        """Return the images of positions, each in [0, n)."""
        numbers, is_whole = positions.copy(), positions < self._n_whole
        runs, places = np.divmod(positions[is_whole], self._run)
        # Map each run of rows only once: the 4096 consecutive positions of a batch span only about 65 runs.
        begins = np.diff(runs, prepend=-1) != 0
        numbers[is_whole] = self._runs(runs[begins])[begins.cumsum() - 1] * self._run + places
        shifted: Indices = (numbers + self._begin) % self._n
        return shifted


def permutation(n: int, run: int, *seed: int) -> Callable[[Indices], Indices]:
    """Return a random order of n rows, keeping runs of `run` neighbours together if there are enough rows."""
    return RunPermutation(n, run, *seed) if run > 1 and n >= _FEWEST_RUNS * run else Permutation(n, *seed)


def mixed(words: Words) -> Words:
    """Hash each word with the mixing function of SplitMix64 (Steele et al. 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _below(words: Words, width: np.uint64) -> Words:
    """Replace each word with its hash in 0 .. width - 1, in place."""
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0xD6E8FEB86659FD93)
    words >>= np.uint64(32)
    words *= width
    words >>= np.uint64(32)
    return words

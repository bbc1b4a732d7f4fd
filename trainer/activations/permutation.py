"""A random order of any number of rows that takes no memory: each position is computed by itself."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

# Four are the fewest that look random from both ends (Luby & Rackoff 1988).
ROUNDS = 4
# Fewer runs than that are not mixed well, and so few rows are in the page cache.
_FEWEST_RUNS = 1024


class Permutation:
    """A seeded bijection of 0 .. n - 1 by a Feistel network on pairs (Black & Rogaway 2002, "Ciphers with arbitrary
    finite domains").

    A position is a pair of halves; each round adds a hash of one half to the other. There are few more pairs than n:
    what ends beyond n goes through once more until it is below. A shuffled list would take 8 bytes for each row and
    be made anew at every start: 8 GB and many seconds for a billion.
    """

    def __init__(self, n: int, *seed: int) -> None:
        self._n = n
        root = math.isqrt(n - 1) + 1
        self._widths = np.array([root, -(-n // root)], np.uint64)
        self._keys = np.random.SeedSequence(seed).generate_state(ROUNDS, np.uint64)

    def __call__(self, positions: Indices) -> Indices:
        """Return where each of some positions 0 .. n - 1 goes."""
        images = self._once(positions.astype(np.uint64))
        while (beyond := images >= self._n).any():
            images[beyond] = self._once(images[beyond])
        return images.view(np.int64)

    def _once(self, positions: Words) -> Words:
        changed, other = np.divmod(positions, self._widths[1])
        for number, key in enumerate(self._keys):
            width = self._widths[number % 2]
            changed += _below(other ^ key, width)
            # Modulo the width: unsigned, a difference below 0 is a huge number.
            np.minimum(changed, changed - width, out=changed)
            changed, other = other, changed
        changed *= self._widths[1]
        changed += other
        return changed


class RunPermutation:
    """A seeded bijection of 0 .. n - 1 that keeps runs of numbers together, in ascending order.

    Where the first run begins is random, so that other rows keep company for each seed. What is left over when n is cut
    into runs goes to the end.
    """

    def __init__(self, n: int, run: int, *seed: int) -> None:
        self._n, self._run, self._n_whole = n, run, n // run * run
        self._runs = Permutation(n // run, *seed)
        self._begin = int(np.random.default_rng(seed).integers(n))

    def __call__(self, positions: Indices) -> Indices:
        """Return where each of some positions 0 .. n - 1 goes."""
        numbers, is_whole = positions.copy(), positions < self._n_whole
        runs, places = np.divmod(positions[is_whole], self._run)
        # FirstLook up once where it begins: the 4096 positions of a batch, a stretch of an epoch, are of 65 runs.
        begins = np.diff(runs, prepend=-1) != 0
        numbers[is_whole] = self._runs(runs[begins])[begins.cumsum() - 1] * self._run + places
        shifted: Indices = (numbers + self._begin) % self._n
        return shifted


def permutation(n: int, run: int, *seed: int) -> Callable[[Indices], Indices]:
    """Return a random order of n rows of which `run` beside each other stay so; of few rows every one by itself."""
    return RunPermutation(n, run, *seed) if run > 1 and n >= _FEWEST_RUNS * run else Permutation(n, *seed)


def mixed(words: Words) -> Words:
    """Hash each word by the mixing function of SplitMix64 (Steele et al. 2014)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _below(words: Words, width: np.uint64) -> Words:
    """Replace each word by its hash in 0 .. width - 1, in place."""
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(32)
    words *= np.uint64(0xD6E8FEB86659FD93)
    words >>= np.uint64(32)
    words *= width
    words >>= np.uint64(32)
    return words

"""Generates rows from a known sparse dictionary on the fly, to measure how well an SAE recovers it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from trainer.activations.base import IndexedSource, Indices
from trainer.activations.permutation import Words, mixed
from trainer.contract.settings.sources import SyntheticSettings

Floats = NDArray[np.float64]


class Synthetic(IndexedSource):
    """Rows that are sparse sums of random unit vectors, `features` [n_features, d_in] (Sharkey et al. 2022).

    Features fire independently. The probability of feature j is about proportional to j^-skew, and its coefficient is
    uniform in 0.5 .. 1.5. A row is generated only from hashes of the seed and of the row's number, so it does not
    depend on the other rows of a batch.
    """

    def __init__(
        self, *, d_in: int, n_features: int, active: float, skew: float, noise: float, n_rows: int, data_seed: int
    ) -> None:
        settings = SyntheticSettings(d_in, n_features, active, skew, noise, n_rows, data_seed)
        self.d_in, self.d_out, _ = settings.shape()
        self.n_tokens = n_rows
        self.place, self.meta = settings.place, dict[str, Any]()
        # Do not use the seed directly: an SAE with the same seed would start with the same random directions.
        key, features_key = np.random.SeedSequence(data_seed).generate_state(2, np.uint64)
        self._noise, self._key = noise, key
        generator = torch.Generator().manual_seed(int(features_key >> 1))
        self.features = normalize(torch.randn(n_features, d_in, generator=generator), dim=1)
        rates = _rates(active, n_features, skew)
        self._features_cumulative = rates.cumsum() / rates.sum()
        self._features_cumulative[-1] = 1
        self._count_cumulative = _poisson_cumulative(float(rates.sum()))

    def rows(self, indices: Indices) -> Tensor:
        """Return rows [n, d_in] in fp32, in ascending order of row number."""
        words = mixed(np.sort(indices).astype(np.uint64) ^ self._key)
        rows = self._sums(words)
        return rows + self._noise * _normal(words, self.d_in) if self._noise else rows

    def name_of(self, index: int) -> str:
        return f"row {index}"

    def _sums(self, words: Words) -> Tensor:
        """Return the sum of a Poisson-distributed number of features for each row.

        Features are sampled in proportion to their rates. How often a feature is sampled is then an independent Poisson
        variable. A feature sampled twice is added twice.
        """
        counts = np.searchsorted(self._count_cumulative, _uniform(words, 0))
        starts = counts.cumsum() - counts
        draws = np.arange(counts.sum()) - starts.repeat(counts)
        chosen = words.repeat(counts) + draws.astype(np.uint64)
        numbers = np.searchsorted(self._features_cumulative, _uniform(chosen, 1), side="right")
        coefficients = (0.5 + _uniform(chosen, 2)).astype(np.float32)
        return embedding_bag(
            torch.from_numpy(numbers),
            self.features,
            torch.from_numpy(starts),
            per_sample_weights=torch.from_numpy(coefficients),
            mode="sum",
        )


def _rates(active: float, n_features: int, skew: float) -> Floats:
    """Return each feature's rate (mean number of draws per row), such that `active` features fire on average.

    A feature fires with probability 1 - e^-rate. Rates are limited to 3 (a probability of 95 %), because the number of
    draws grows without bound as the probability approaches 1.
    """
    shares = np.arange(1.0, n_features + 1) ** -skew

    def rates(scale: float) -> Floats:
        return np.minimum(scale * shares, 3.0)

    low, high = 0.0, 3.0 / float(shares[-1])
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-rates(middle)).sum() < active else (low, middle)
    return rates(high)


def _poisson_cumulative(rate: float) -> Floats:
    counts = np.arange(1.0, rate + 12 * rate**0.5 + 20)
    logs = np.concatenate([[0.0], (np.log(rate) - np.log(counts)).cumsum()]) - rate
    return np.exp(logs).cumsum()


def _uniform(words: Words, stream: int) -> Floats:
    """Return a uniform random number in [0, 1) for each word; streams are independent of each other."""
    numbers: Floats = (mixed(words ^ np.uint64(stream << 56)) >> np.uint64(11)) * np.float64(2.0**-53)
    return numbers


# Quantiles of the normal distribution at the centres of 65,536 equal intervals of probability; more intervals would
# make no practical difference.
_QUANTILES = torch.special.ndtri((torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16).float()


def _normal(words: Words, d: int) -> Tensor:
    """Return d normal random numbers [n, d] for each word; each 64-bit hash of a word yields four of them."""
    n_words = -(-d // 4)
    hashes = mixed(words[:, None] + (np.arange(n_words, dtype=np.uint64) | np.uint64(3 << 56)))
    normal: Tensor = _QUANTILES[torch.from_numpy(hashes.view(np.uint16)[:, :d].astype(np.int64))]
    return normal

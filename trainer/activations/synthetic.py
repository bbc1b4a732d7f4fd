"""Generates rows from a known sparse dictionary on the fly, to measure how well an SAE recovers it."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag, normalize

from trainer.activations.base import IndexedSource, Indices
from trainer.activations.permutation import Words, mixed
from trainer.contract.settings.sources import MOST_DRAWS, MOST_GIVEN_PARENT, SHARE_OF_TOPIC, SyntheticSettings

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class FeatureFirings(NamedTuple):
    """Firing features, as parallel arrays: the row's position in the request, the feature's index, and its coefficient.

    Entries are sorted by `rows`. A feature may be listed twice for the same row; its coefficients are then added.
    """

    rows: Integers
    features: Integers
    coefficients: Floats


class Synthetic(IndexedSource):
    """Rows that are sparse sums of random unit vectors, `features` [n_features, d_in] (Sharkey et al. 2022).

    Feature j fires with a probability roughly proportional to j^-skew, and its coefficient is uniform in 0.5 .. 1.5.
    Each row is generated solely from hashes of the seed and the row's number, so it does not depend on the other rows
    in its batch. Features fire independently, unless there are trees (`children`) or groups (`topics`).
    """

    def __init__(self, **options: Any) -> None:
        """Accept the fields of `SyntheticSettings` as keyword arguments."""
        settings = SyntheticSettings(**options)
        self.d_in, self.d_out = settings.shape()[:2]
        self.n_tokens = settings.n_rows
        # A short hash that identifies the data's settings.
        self.digest = hashlib.sha256(msgspec.json.encode(settings)).hexdigest()[:12]
        self.place, self.meta = settings.place, dict[str, Any]()
        # Do not use the seed directly: an SAE with the same seed would start with the same random directions.
        key, features_key = np.random.SeedSequence(settings.data_seed).generate_state(2, np.uint64)
        self._noise, self._key = settings.noise, key
        generator = torch.Generator().manual_seed(int(features_key >> 1))
        self.features = normalize(torch.randn(settings.n_features, self.d_in, generator=generator), dim=1)
        self._groups = _Groups(settings)
        rates, self._given_parent = _rates(settings, self._groups)
        self._groups.fit(rates)
        self._children, self._n_roots = settings.children, len(rates)
        self._count_cumulative = _poisson_cumulative(float(rates.sum()))

    def rows(self, indices: Indices) -> Tensor:
        """Return rows [n, d_in] in fp32, in ascending order of row number."""
        words = self._words(indices)
        fired = self._firings(words)
        rows = embedding_bag(
            torch.from_numpy(fired.features),
            self.features,
            torch.from_numpy(np.searchsorted(fired.rows, np.arange(len(words)))),
            per_sample_weights=torch.from_numpy(fired.coefficients.astype(np.float32)),
            mode="sum",
        )
        return rows + self._noise * _normal(words, self.d_in) if self._noise else rows

    def firings(self, indices: Indices) -> Tensor:
        """Return each feature's coefficient in each row, [n, n_features], in ascending order of row number."""
        words = self._words(indices)
        fired = self._firings(words)
        found = torch.zeros(len(words), len(self.features))
        place = torch.from_numpy(fired.rows), torch.from_numpy(fired.features)
        return found.index_put_(place, torch.from_numpy(fired.coefficients).float(), accumulate=True)

    def name_of(self, index: int) -> str:
        return f"row {index}"

    def _words(self, indices: Indices) -> Words:
        return mixed(np.sort(indices).astype(np.uint64) ^ self._key)

    def _firings(self, words: Words) -> FeatureFirings:
        """Return the features that fire in each row.

        For each row, roots are sampled a Poisson-distributed number of times, in proportion to their rates. The number
        of times each root is sampled is then an independent Poisson variable. A root sampled twice is added twice.
        """
        counts = np.searchsorted(self._count_cumulative, _uniform(words, 0))
        rows = np.arange(len(words)).repeat(counts)
        starts = counts.cumsum() - counts
        draws = np.arange(counts.sum()) - starts.repeat(counts)
        chosen = words.repeat(counts) + draws.astype(np.uint64)
        roots = self._groups.roots(words, rows, chosen)
        fired = FeatureFirings(rows, roots, 0.5 + _uniform(chosen, 2))
        return self._with_children(words, fired) if self._children else fired

    def _with_children(self, words: Words, fired: FeatureFirings) -> FeatureFirings:
        """Add the children that fire; a child of a firing parent fires with the child's own probability."""
        n, c = len(self.features), self._children
        levels, parents = [fired], np.unique(fired.rows * n + fired.features)
        while len(parents):
            rows, features = parents // n, parents % n
            rows, children = rows.repeat(c), (self._n_roots + features[:, None] * c + np.arange(c)).ravel()
            rows, children = rows[children < n], children[children < n]
            own = mixed(words[rows] ^ (children.astype(np.uint64) << np.uint64(20)))
            fires = _uniform(own, 4) < self._given_parent[children]
            rows, children = rows[fires], children[fires]
            levels.append(FeatureFirings(rows, children, 0.5 + _uniform(own[fires], 5)))
            parents = rows * n + children
        whole = FeatureFirings(*map(np.concatenate, zip(*levels, strict=True)))
        order = np.argsort(whole.rows, kind="stable")
        return FeatureFirings(whole.rows[order], whole.features[order], whole.coefficients[order])


class _Groups:
    """Chooses each row's roots. With topics, half of them, on average, are drawn from the roots of the row's topic."""

    def __init__(self, settings: SyntheticSettings) -> None:
        self._n = settings.topics
        # Roots with adjacent frequency ranks belong to different topics.
        self._topic_of = np.arange(settings.n_roots) % max(1, self._n)

    def fire(self, rates: Floats) -> Floats:
        """Return each root's probability of firing, averaged over topics; `rates` are mean draws per row."""
        if not self._n:
            return -np.expm1(-rates)
        shares = self._shares(rates)[self._topic_of]
        inside = rates * (1 - SHARE_OF_TOPIC + SHARE_OF_TOPIC / shares)
        return -shares * np.expm1(-inside) - (1 - shares) * np.expm1(-rates * (1 - SHARE_OF_TOPIC))

    def _shares(self, rates: Floats) -> Floats:
        """Return each topic's share of the draws, which is also the share of rows with that topic."""
        found: Floats = np.bincount(self._topic_of, rates, minlength=self._n) / rates.sum()
        return found

    def fit(self, rates: Floats) -> None:
        """Set the root rates to use from now on."""
        self._cumulative = _cumulative(rates)
        if self._n:
            self._topics = _cumulative(self._shares(rates))
            own = [np.flatnonzero(self._topic_of == topic) for topic in range(self._n)]
            self._own = [(roots, _cumulative(rates[roots])) for roots in own]

    def roots(self, words: Words, rows: Integers, chosen: Words) -> Integers:
        """Return a root for each draw; `chosen` has each draw's word, and `rows` the index of its row in `words`."""
        uniform = _uniform(chosen, 1)
        found = np.searchsorted(self._cumulative, uniform, side="right")
        if self._n:
            topics = np.searchsorted(self._topics, _uniform(words, 6), side="right")[rows]
            is_own = _uniform(chosen, 7) < SHARE_OF_TOPIC
            for topic, (roots, cumulative) in enumerate(self._own):
                these = is_own & (topics == topic)
                found[these] = roots[np.searchsorted(cumulative, uniform[these], side="right")]
        return found


def _cumulative(rates: Floats) -> Floats:
    found: Floats = rates.cumsum() / rates.sum()
    found[-1] = 1
    return found


def _rates(settings: SyntheticSettings, groups: _Groups) -> tuple[Floats, Floats]:
    """Return each root's rate (mean draws per row), and each feature's probability of firing if its parent fires.

    The rates are chosen so that, on average, `active` features fire per row. A root fires with probability 1 - e^-rate.
    """
    n, c, n_roots = settings.n_features, settings.children, settings.n_roots
    shares = np.arange(1.0, n + 1) ** -settings.skew

    def at(scale: float) -> tuple[Floats, Floats, float]:
        rates = np.minimum(scale * shares, MOST_DRAWS)
        fire, given = groups.fire(rates[:n_roots]), np.ones(n)
        if c:
            wanted, first = -np.expm1(-rates), n_roots
            fire = np.concatenate([fire, np.zeros(n - n_roots)])
            while first < n:
                # Features first .. last - 1 are children of features before `first`, whose probabilities are already
                # known.
                last = min(n, n_roots + first * c)
                parents = (np.arange(first, last) - n_roots) // c
                given[first:last] = np.minimum(MOST_GIVEN_PARENT, wanted[first:last] / fire[parents].clip(1e-300))
                fire[first:last] = given[first:last] * fire[parents]
                first = last
        return rates[:n_roots], given, float(fire.sum())

    low, high = 0.0, MOST_DRAWS / float(shares[-1])
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if at(middle)[2] < settings.active else (low, middle)
    rates, given, _ = at(high)
    return rates, given


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
    """Return d standard normal random numbers for each word, [n, d]; each 64-bit hash of a word yields four of them."""
    n_words = -(-d // 4)
    hashes = mixed(words[:, None] + (np.arange(n_words, dtype=np.uint64) | np.uint64(3 << 56)))
    normal: Tensor = _QUANTILES[torch.from_numpy(hashes.view(np.uint16)[:, :d].astype(np.int64))]
    return normal

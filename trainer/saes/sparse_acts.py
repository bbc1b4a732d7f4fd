"""Latent activations of a batch: only the active ones, or a dense matrix where most are active."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Rows of a mask that are counted at a time.
COUNTED_AT_ONCE = 512


class ByLatent(NamedTuple):
    """Entries sorted by latent, then token: their `order` [n], and where each latent begins in it, `starts` [d_sae]."""

    order: Tensor
    starts: Tensor


class Filled(NamedTuple):
    """How many entries count, `n` (0-dim, on their device), and how many of them are to be expected."""

    n: Tensor
    expected: int


class Places:
    """Where the entries of sparse activations are: flat, ordered by token.

    Entry i belongs to latent `latents[i]` and token `tokens[i]`; token t's entries begin at `starts[t]`. Where the host
    does not know how many there are, only those that are `filled` count. The rest follow them in any order: no two are
    at the same place, and their values are 0.
    """

    def __init__(self, latents: Tensor, tokens: Tensor | None, starts: Tensor, filled: Filled | None = None) -> None:
        self.latents, self.starts, self.filled = latents, starts, filled
        # Where every token has as many entries they follow from that, and are made only where they are asked for.
        self._tokens = tokens
        self._sorted = _Sorted(latents, filled)
        self._tokens_by_latent: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        if self._tokens is None:
            self._tokens = torch.arange(len(self.starts), device=self.starts.device).repeat_interleave(self._per_token)
        return self._tokens

    @property
    def _per_token(self) -> int:
        return len(self.latents) // max(len(self.starts), 1)

    def by_latent(self, d_sae: int) -> ByLatent:
        """Return the order in which the gradients of both weights read the entries; sort at the first call only."""
        return self._sorted.by_latent(d_sae)

    def tokens_by_latent(self, d_sae: int) -> Tensor:
        """Return the tokens of the entries in that order, [n]."""
        if self._tokens_by_latent is None:
            order = self.by_latent(d_sae).order
            # Divided on a GPU, in one operation where all tokens and an index take three; a CPU takes longer for it.
            divides = self._tokens is None and order.is_cuda
            self._tokens_by_latent = order // self._per_token if divides else self.tokens.index_select(0, order)
        return self._tokens_by_latent

    def latents_of_windows(self, d_sae: int, longest: int) -> Tensor:
        """Return whose entries in that order lie at the beginning of each window of `longest`."""
        return self._sorted.latents_of_windows(d_sae, longest)

    def regroup(self, tokens: Tensor, n_tokens: int) -> Places:
        """Return the same latents in the same order under other tokens, ascending [n]; both share one sorting."""
        if self.filled is not None:
            tokens = fill_rest(tokens, self.filled, n_tokens - 1)
        starts = torch.searchsorted(tokens, torch.arange(n_tokens, device=tokens.device))
        places = Places(self.latents, tokens, starts, self.filled)
        places._sorted = self._sorted
        return places


def fill_rest(numbers: Tensor, filled: Filled, number: int) -> Tensor:
    """Return a copy of the entries' numbers [n] with `number` for those that do not count."""
    return numbers.masked_fill(torch.arange(len(numbers), device=numbers.device) >= filled.n, number)


class _Sorted:
    def __init__(self, latents: Tensor, filled: Filled | None) -> None:
        self._latents, self._filled = latents, filled
        self._found: ByLatent | None = None
        self._windows: dict[int, Tensor] = {}

    def by_latent(self, d_sae: int) -> ByLatent:
        if self._found is None:
            self._found = _sorted_by_latent(self._latents, self._filled, d_sae)
        return self._found

    def latents_of_windows(self, d_sae: int, longest: int) -> Tensor:
        if longest not in self._windows:
            order, starts = self.by_latent(d_sae)
            windows = torch.arange(0, len(order), longest, device=starts.device)
            # The last of several latents that begin at the same entry is the one that has it. The first begins at 0.
            self._windows[longest] = torch.searchsorted(starts[1:], windows, right=True)
        return self._windows[longest]


def _sorted_by_latent(latents: Tensor, filled: Filled | None, d_sae: int) -> ByLatent:
    n_keys = d_sae
    if filled is not None:
        # Behind all others.
        n_keys, latents = d_sae + 1, fill_rest(latents, filled, d_sae)
    # A radix sort's time goes with the width of its keys: for 131,072 of them on one core 0.8 ms for 16 bits, 2 ms
    # for 32 and 4 ms for 64.
    dtype, lowest = (torch.int16, -(2**15)) if n_keys <= 2**16 else (torch.int32, 0)
    keys, order = torch.add(latents, lowest, out=latents.new_empty(len(latents), dtype=dtype)).sort(stable=True)
    first = torch.arange(lowest, lowest + d_sae, dtype=dtype, device=latents.device)
    return ByLatent(order, torch.searchsorted(keys, first))


class SparseActs(NamedTuple):
    """Activations `values` [n] at `places`; a value of 0 is inactive."""

    values: Tensor
    places: Places
    d_sae: int

    def at(self, per_latent: Tensor) -> Tensor:
        """Return the element of a vector [d_sae] that belongs to each entry's latent: [n]."""
        return per_latent.index_select(0, self.places.latents)

    def total(self, weights: Tensor) -> Tensor:
        """Return the sum of all activations, each times its latent's weight of a vector [d_sae]: 0-dim."""
        return (self.values * self.at(weights)).sum()

    def with_values(self, values: Tensor) -> SparseActs:
        return self._replace(values=values)

    def count_by_latent(self, is_counted: Tensor) -> Tensor:
        """Count for each latent how many of its entries are marked in a bool [n]: float [d_sae]."""
        return _per(self.places.latents, is_counted, self.d_sae)

    def per_token(self, values: Tensor) -> Tensor:
        """Sum numbers of the entries [n] for each token: [n_tokens]."""
        return _per(self.places.tokens, values, len(self.places.starts))

    def dense(self) -> Tensor:
        """Return the same activations as a matrix [n_tokens, d_sae]."""
        whole = self.values.new_zeros(len(self.places.starts), self.d_sae)
        return whole.index_put((self.places.tokens, self.places.latents), self.values)


class DenseActs(NamedTuple):
    """Activations `values` [n_tokens, d_sae]; a value of 0 is inactive."""

    values: Tensor

    def at(self, per_latent: Tensor) -> Tensor:
        """Return the vector [d_sae] itself, which broadcasts over tokens."""
        return per_latent

    def total(self, weights: Tensor) -> Tensor:
        """Return the sum of all activations, each times its latent's weight of a vector [d_sae]: 0-dim."""
        # Added up before they are weighed they take one pass, and their gradient is the vector itself.
        return (self.values.sum(dim=0) * weights).sum()

    def with_values(self, values: Tensor) -> DenseActs:
        return DenseActs(values)

    def count_by_latent(self, is_counted: Tensor) -> Tensor:
        """Count for each latent how many tokens are marked in a bool [n_tokens, d_sae]: float [d_sae]."""
        return marked_in_columns(is_counted)

    def per_token(self, values: Tensor) -> Tensor:
        """Sum numbers [n_tokens, d_sae] for each token: [n_tokens]."""
        return values.sum(dim=1)

    def dense(self) -> Tensor:
        """Return the activations, [n_tokens, d_sae]."""
        return self.values


Acts = SparseActs | DenseActs


def marked_in_columns(mask: Tensor) -> Tensor:
    """Count what is marked in each column of a bool [n_rows, n]: fp32 [n].

    Of a bool torch adds up a copy, of 8 bytes for each element where it is not told otherwise: 0.8 GB of 4,096 tokens
    and 24,576 latents. Of a part of the rows at a time it is small.
    """
    parts = mask.split(COUNTED_AT_ONCE)
    return torch.stack([part.sum(dim=0, dtype=torch.float32) for part in parts]).sum(dim=0)


def _per(groups: Tensor, values: Tensor, n_groups: int) -> Tensor:
    values = values.float() if values.dtype == torch.bool else values
    return values.new_zeros(n_groups).index_add(0, groups, values)

"""A batch's latent activations: a list of the active latents, or a dense matrix if many latents are active."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# The number of mask rows counted at once.
COUNTED_AT_ONCE = 512


class ByLatent(NamedTuple):
    """Activation entries, sorted by latent and then by token.

    `order` [n] is the permutation of the entries, and `starts` [d_sae] contains the position of each latent's first
    entry in it.
    """

    order: Tensor
    starts: Tensor


class Filled(NamedTuple):
    """The number of valid entries: the exact count `n` (0-dim, on the entries' device) and the host's estimate."""

    n: Tensor
    expected: int


class SparseIndices:
    """The positions of sparse activations: a flat list of entries, ordered by token.

    Entry i belongs to latent `latents[i]` and token `tokens[i]`; the entries of token t start at `starts[t]`. If the
    host does not know the number of entries, `filled` contains the number of valid ones. The padding entries at the end
    have distinct positions in no particular order, and values of 0.
    """

    def __init__(self, latents: Tensor, tokens: Tensor | None, starts: Tensor, filled: Filled | None = None) -> None:
        self.latents, self.starts, self.filled = latents, starts, filled
        # If every token has the same number of entries, `tokens` may be None; it is then computed on first use.
        self.is_even = tokens is None
        self._tokens = tokens
        self._sorted = _Sorted(latents, filled)
        self._tokens_by_latent: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        if self._tokens is None:
            self._tokens = torch.arange(len(self.starts), device=self.starts.device).repeat_interleave(self.per_token)
        return self._tokens

    @property
    def per_token(self) -> int:
        """The number of entries of each token, if it is the same for all tokens."""
        return len(self.latents) // max(len(self.starts), 1)

    def by_latent(self, d_sae: int) -> ByLatent:
        """Return the entries sorted by latent, as both weight gradients need them; the result is cached."""
        return self._sorted.by_latent(d_sae)

    def tokens_by_latent(self, d_sae: int) -> Tensor:
        """Return each entry's token, with the entries sorted by latent, [n]."""
        if self._tokens_by_latent is None:
            order = self.by_latent(d_sae).order
            # On a GPU, one division replaces three operations and an index tensor. On a CPU, dividing is slower.
            divides = self._tokens is None and order.is_cuda
            self._tokens_by_latent = order // self.per_token if divides else self.tokens.index_select(0, order)
        return self._tokens_by_latent

    def latents_of_windows(self, d_sae: int, longest: int) -> Tensor:
        """Return the latent of the first entry in each window of `longest` entries sorted by latent."""
        return self._sorted.latents_of_windows(d_sae, longest)

    def regroup(self, tokens: Tensor, n_tokens: int) -> SparseIndices:
        """Return the same entries, in the same order, with new token indices: `tokens` [n], ascending.

        Both objects share the cached sort by latent.
        """
        if self.filled is not None:
            tokens = fill_rest(tokens, self.filled, n_tokens - 1)
        starts = torch.searchsorted(tokens, torch.arange(n_tokens, device=tokens.device))
        indices = SparseIndices(self.latents, tokens, starts, self.filled)
        indices._sorted = self._sorted
        return indices


def fill_rest(numbers: Tensor, filled: Filled, number: int) -> Tensor:
    """Return a copy of `numbers` [n] in which `number` replaces the padding."""
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
            # If several latents start at the same entry, it belongs to the last of them, and the others have no
            # entries. The first latent always starts at entry 0.
            self._windows[longest] = torch.searchsorted(starts[1:], windows, right=True)
        return self._windows[longest]


def _sorted_by_latent(latents: Tensor, filled: Filled | None, d_sae: int) -> ByLatent:
    n_keys = d_sae
    if filled is not None:
        # Give padding the largest key, so that it is sorted to the end.
        n_keys, latents = d_sae + 1, fill_rest(latents, filled, d_sae)
    # A radix sort takes longer for larger keys: on one core, 131,072 keys take 0.8 ms with 16 bits, 2 ms with 32 bits
    # and 4 ms with 64 bits.
    dtype, lowest = (torch.int16, -(2**15)) if n_keys <= 2**16 else (torch.int32, 0)
    keys, order = torch.add(latents, lowest, out=latents.new_empty(len(latents), dtype=dtype)).sort(stable=True)
    first = torch.arange(lowest, lowest + d_sae, dtype=dtype, device=latents.device)
    return ByLatent(order, torch.searchsorted(keys, first))


class SparseActs(NamedTuple):
    """Activations `values` [n] at `indices`; a value of 0 is inactive."""

    values: Tensor
    indices: SparseIndices
    d_sae: int

    def at(self, per_latent: Tensor) -> Tensor:
        """Return the element of the vector `per_latent` [d_sae] for each entry's latent, [n]."""
        return per_latent.index_select(0, self.indices.latents)

    def total(self, weights: Tensor) -> Tensor:
        """Return the sum of all activations, each weighted by its latent's element of `weights` [d_sae], 0-dim."""
        return (self.values * self.at(weights)).sum()

    def with_values(self, values: Tensor) -> SparseActs:
        return self._replace(values=values)

    def count_by_latent(self, is_counted: Tensor) -> Tensor:
        """Return, for each latent, how many of its entries are marked in a bool mask [n]: float [d_sae]."""
        return _per(self.indices.latents, is_counted, self.d_sae)

    def per_token(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [n] over each token's entries, [n_tokens]."""
        return _per(self.indices.tokens, values, len(self.indices.starts))

    def dense(self) -> Tensor:
        """Return the same activations as a matrix [n_tokens, d_sae]."""
        whole = self.values.new_zeros(len(self.indices.starts), self.d_sae)
        return whole.index_put((self.indices.tokens, self.indices.latents), self.values)


class DenseActs(NamedTuple):
    """Activations `values` [n_tokens, d_sae]; a value of 0 is inactive."""

    values: Tensor

    def at(self, per_latent: Tensor) -> Tensor:
        """Return the vector [d_sae] itself, which broadcasts over tokens."""
        return per_latent

    def total(self, weights: Tensor) -> Tensor:
        """Return the sum of all activations, each weighted by its latent's element of `weights` [d_sae], 0-dim."""
        # Sum before weighting, so that one pass suffices and the gradient of the activations is the vector itself.
        return (self.values.sum(dim=0) * weights).sum()

    def with_values(self, values: Tensor) -> DenseActs:
        return DenseActs(values)

    def count_by_latent(self, is_counted: Tensor) -> Tensor:
        """Return, for each latent, how many tokens are marked in a bool mask [n_tokens, d_sae]: float [d_sae]."""
        return marked_in_columns(is_counted)

    def per_token(self, values: Tensor) -> Tensor:
        """Return the sum of `values` [n_tokens, d_sae] over each token's latents, [n_tokens]."""
        return values.sum(dim=1)

    def dense(self) -> Tensor:
        """Return the activations, [n_tokens, d_sae]."""
        return self.values


Acts = SparseActs | DenseActs


def active_entries(acts: Acts) -> tuple[Tensor, Tensor, Tensor]:
    """Return each positive activation's latent, token and value."""
    if isinstance(acts, DenseActs):
        tokens, latents = torch.nonzero(acts.values > 0, as_tuple=True)
        return latents, tokens, acts.values[tokens, latents]
    fires = acts.values > 0
    return acts.indices.latents[fires].long(), acts.indices.tokens[fires].long(), acts.values[fires]


def marked_in_columns(mask: Tensor) -> Tensor:
    """Return the number of marked elements in each column of a bool mask [n_rows, n]: fp32 [n].

    `sum` copies a bool tensor, by default with 8 bytes per element: 0.8 GB for 4,096 tokens and 24,576 latents. Summing
    in chunks of rows keeps the copy small.
    """
    parts = mask.split(COUNTED_AT_ONCE)
    return torch.stack([part.sum(dim=0, dtype=torch.float32) for part in parts]).sum(dim=0)


def _per(groups: Tensor, values: Tensor, n_groups: int) -> Tensor:
    values = values.float() if values.dtype == torch.bool else values
    return values.new_zeros(n_groups).index_add(0, groups, values)

"""Assigns latents to ranks and converts between full tensors and local shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.parallel.group import Group


class Latents:
    """An SAE's `n_total` latents, sharded over a group in proportion to `shares` (default: evenly).

    Latents are interleaved across ranks, so that every prefix, such as a level of a Matryoshka SAE, is spread evenly.
    """

    def __init__(self, n_total: int, group: Group | None = None, shares: Sequence[float] | None = None) -> None:
        self.n_total, self.group = n_total, group or Group()
        self._ids = shard_latents(n_total, shares or [1.0] * self.group.size)

    @property
    def own(self) -> Tensor:
        """The indices of this rank's latents, int64 [n_own] on the CPU, ascending."""
        return self._ids[self.group.index]

    @property
    def is_shared(self) -> bool:
        return self.group.size > 1

    @property
    def sizes(self) -> list[int]:
        """The number of latents on each rank."""
        return [len(ids) for ids in self._ids]

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return the local shard of a tensor that has all latents along `dim`, in the same memory order."""
        if not self.is_shared:
            return whole
        return whole.movedim(dim, 0).index_select(0, self.own.to(whole.device)).movedim(0, dim)

    def whole(self, own: Tensor) -> Tensor:
        """All-gather a vector over latents: from [n_own] on each rank to [n_total] on every rank."""
        if not self.is_shared:
            return own
        padded = own.new_zeros(max(self.sizes))
        padded[: len(own)] = own
        values_of_all = own.new_empty(self.n_total)
        for ids, values in zip(self._ids, self.group.gather(padded), strict=True):
            values_of_all[ids.to(own.device)] = values[: len(ids)]
        return values_of_all

    def collect(self, own: Tensor, dim: int) -> Tensor | None:
        """On the first rank, return the full tensor on the CPU; on other ranks, return None. Call this on all ranks."""
        parts = self.group.collect(own, self.sizes, dim)
        if not self.is_shared or not parts:
            return parts[0] if parts else None
        shape = list(own.shape)
        shape[dim] = self.n_total
        whole = parts[0].new_empty(shape)
        for ids, part in zip(self._ids, parts, strict=True):
            whole.index_copy_(dim, ids, part)
        return whole


def shard_latents(n_total: int, shares: Sequence[float]) -> tuple[Tensor, ...]:
    """Return the indices of each rank's latents, ascending and interleaved, with counts in proportion to `shares`."""
    counts = apportion(n_total, shares)
    places = torch.cat([(torch.arange(count, dtype=torch.float64) + 0.5) / max(count, 1) for count in counts])
    parts: tuple[Tensor, ...] = places.argsort(stable=True).argsort().split(counts)
    return parts


def apportion(n_total: int, shares: Sequence[float]) -> list[int]:
    """Return integers in proportion to `shares` that sum to `n_total` (largest-remainder method)."""
    exact = [n_total * share / sum(shares) for share in shares]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: n_total - sum(counts)]:
        counts[rank] += 1
    return counts

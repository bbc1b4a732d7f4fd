"""HierarchicalTopK SAE (Balagansky et al. 2025, arXiv 2505.24473)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.contract.settings.architectures import HierarchicalTopKSettings
from trainer.parallel.group import Group
from trainer.saes.base import SaeSpec
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import Chosen
from trainer.saes.nested import Nested
from trainer.saes.sparse_acts import SparseActs, SparseIndices, fill_rest
from trainer.saes.topk import TopK


class HierarchicalTopK(Nested):
    """A TopK SAE that can also be used with fewer than k latents per token.

    The loss is the mean over the reconstructions from the k, k / 2, k / 4, … largest activations of each token.
    """

    traits = TopK.traits._replace(losses=("mse", "inner_mse", "auxk"))
    settings: HierarchicalTopKSettings

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__(spec)
        self.n_levels = len(self.settings.ks)

    def _choose(self, pre_acts: PreActs, k: int) -> Chosen:
        return _largest_first(*super()._choose(pre_acts, k))

    def _by_level(self, acts: SparseActs) -> SparseActs:
        """Regroup the activations by level; a token's entries are ordered by value, and therefore by level.

        Activations that equal the smallest one of a level all belong to that level, so that the result does not depend
        on how latents are divided among ranks.
        """
        n_tokens, tokens = len(acts.indices.starts), acts.indices.tokens
        bounds = _bounds(acts, self.settings.ks, self.latents.group).index_select(0, tokens.clamp_max(n_tokens - 1))
        levels = (acts.values.detach()[:, None] < bounds).sum(dim=1)
        bags = torch.add(levels, tokens, alpha=self.n_levels)
        return acts._replace(indices=acts.indices.regroup(bags, n_tokens * self.n_levels))


def _largest_first(indices: SparseIndices, values: Tensor) -> Chosen:
    """Sort each token's entries by value, largest first."""
    n_tokens = len(indices.starts)
    if indices.is_even:
        ordered, columns = values.view(n_tokens, -1).sort(dim=1, descending=True, stable=True)
        order = (columns + indices.starts[:, None]).flatten()
        return SparseIndices(indices.latents.index_select(0, order), None, indices.starts), ordered.flatten()
    tokens = indices.tokens if indices.filled is None else fill_rest(indices.tokens, indices.filled, n_tokens)
    order = values.argsort(descending=True, stable=True)
    order = order.index_select(0, tokens.index_select(0, order).argsort(stable=True))
    latents, tokens = (one.index_select(0, order) for one in (indices.latents, indices.tokens))
    return SparseIndices(latents, tokens, indices.starts, indices.filled), values.index_select(0, order)


def _bounds(acts: SparseActs, ks: tuple[int, ...], group: Group) -> Tensor:
    """Return the smallest activation of each level except the last, [n_tokens, n_levels − 1], over all ranks."""
    values, places = _by_token(acts, ks[-2] if len(ks) > 1 else 1), [k - 1 for k in ks[:-1]]
    if group.size == 1:
        return values[:, places]
    largest = group.to_owners(values).movedim(0, 1).flatten(1).sort(dim=1, descending=True).values
    return group.from_owners(largest[:, places].expand(group.size, -1, -1), len(values))


def _by_token(acts: SparseActs, n: int) -> Tensor:
    """Return each token's first n activations, [n_tokens, n]; missing ones are −∞."""
    values, indices = acts.values.detach(), acts.indices
    n_tokens = len(indices.starts)
    if indices.is_even:
        own = values.view(n_tokens, -1)[:, :n]
        return F.pad(own, (0, n - own.shape[1]), value=-torch.inf)
    tokens = indices.tokens if indices.filled is None else fill_rest(indices.tokens, indices.filled, n_tokens)
    places = torch.arange(len(tokens), device=tokens.device) - F.pad(indices.starts, (0, 1)).index_select(0, tokens)
    # Entries beyond the first n, and padding, go to an extra row and column.
    is_spare = (places >= n) | (tokens == n_tokens)
    whole = values.new_full((n_tokens + 1, n + 1), -torch.inf)
    whole.index_put_((tokens.masked_fill(is_spare, n_tokens), places.masked_fill(is_spare, n)), values)
    return whole[:n_tokens, :n].contiguous()

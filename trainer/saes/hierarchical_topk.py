"""HierarchicalTopK SAE (Balagansky et al. 2025, arXiv 2505.24473)."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.contract.settings.architectures import HierarchicalTopKSettings
from trainer.parallel.group import Group
from trainer.saes.base import SaeSpec
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import Chosen
from trainer.saes.nested import Nested
from trainer.saes.sparse_acts import Acts, SparseActs, SparseIndices, fill_rest
from trainer.saes.topk import TopK


class HierarchicalTopK(Nested):
    """A TopK SAE that can be used with fewer than k latents per token.

    The loss is a weighted mean over the reconstructions from the k, k / 2, k / 4, … largest activations of each token.
    The paper averages over all numbers of activations, or over a subset such as this one, with equal weights.
    """

    traits = TopK.traits._replace(losses=("mse", "inner_mse", "auxk"))
    settings: HierarchicalTopKSettings
    # At MiniLM's block 2 and SmolLM2's block 16 (k 64, 391 steps of 512 rows), the FVU with k = 64 was 8 % and 3 %
    # higher than that of an SAE trained for k = 64 alone if all weights were equal, and 4 % and 1 % higher with this
    # weight. With k = 8, it was 3 % higher and 1 % lower, and 5 % and 1 % higher.
    full_weight = 1.5

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__(spec)
        self.n_levels = len(self.settings.ks)

    def _choose(self, pre_acts: PreActs, k: int) -> Chosen:
        return _largest_first(*super()._choose(pre_acts, k))

    def prefixes(self, acts: Acts, x: Tensor) -> Tensor:
        """Return the reconstruction with each of `settings.ks` latents per token, [n_tokens, n_levels, d_out].

        `acts` are the activations for x [n_tokens, d_in] in evaluation mode.
        """
        return self._parts(acts).cumsum(dim=1) + self.offset(x).expand(len(x), -1)[:, None]

    def _by_level(self, acts: SparseActs) -> SparseActs:
        """Regroup the activations by level; a token's entries are ordered by value, and therefore by level."""
        n_tokens, inner = len(acts.indices.starts), self.settings.ks[:-1]
        places = _places(acts, inner[-1] if inner else 0, self.latents.group)
        # Comparing with numbers, rather than with a tensor of them, does not make the host wait for a GPU.
        bags = acts.indices.tokens * self.n_levels
        for k in inner:
            bags += places >= k
        return acts._replace(indices=acts.indices.regroup(bags, n_tokens * self.n_levels))


def _largest_first(indices: SparseIndices, values: Tensor) -> Chosen:
    """Sort the entries of each token by value, the largest first."""
    n_tokens = len(indices.starts)
    if indices.is_even:
        ordered, columns = values.view(n_tokens, indices.per_token).sort(dim=1, descending=True, stable=True)
        order = (columns + indices.starts[:, None]).flatten()
        return SparseIndices(indices.latents.index_select(0, order), None, indices.starts), ordered.flatten()
    tokens = indices.tokens if indices.filled is None else fill_rest(indices.tokens, indices.filled, n_tokens)
    order = values.argsort(descending=True, stable=True)
    order = order.index_select(0, tokens.index_select(0, order).argsort(stable=True))
    latents, tokens = (one.index_select(0, order) for one in (indices.latents, indices.tokens))
    return SparseIndices(latents, tokens, indices.starts, indices.filled), values.index_select(0, order)


def _places(acts: SparseActs, n: int, group: Group) -> Tensor:
    """Return each entry's place among all entries of its token in descending order, [n_entries], over all ranks.

    Places of n or more are not exact. Of equal values, those on the first rank come first. The places of padding are
    arbitrary.
    """
    indices = acts.indices
    n_tokens, n_entries = len(indices.starts), len(indices.latents)
    places = torch.arange(n_entries, device=indices.latents.device)
    if indices.is_even:
        return places % max(indices.per_token, 1)
    places -= indices.starts.index_select(0, indices.tokens)
    if group.size == 1 or not n:
        return places
    is_first = places < n
    columns = places.clamp(0, n - 1)
    whole = _by_token(acts.values.detach(), indices, columns, is_first, n)
    of_all = group.to_owners(whole).movedim(0, 1)
    order = of_all.flatten(1).argsort(dim=1, descending=True, stable=True)
    across = order.argsort(dim=1).view(of_all.shape).movedim(1, 0).contiguous()
    own = group.from_owners(across.int(), n_tokens)
    return own[indices.tokens, columns].where(is_first, n)


def _by_token(values: Tensor, indices: SparseIndices, columns: Tensor, is_first: Tensor, n: int) -> Tensor:
    """Return the first n activations of each token, [n_tokens, n]; missing ones are −∞."""
    n_tokens = len(indices.starts)
    tokens = indices.tokens if indices.filled is None else fill_rest(indices.tokens, indices.filled, n_tokens)
    # Other entries, and padding, go to an extra row.
    whole = values.new_full((n_tokens + 1, n), -torch.inf)
    whole.index_put_((tokens.where(is_first, n_tokens), columns), values)
    return whole[:n_tokens]

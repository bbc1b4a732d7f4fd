"""Matryoshka BatchTopK SAE (Bussmann et al. 2025, arXiv 2503.17547)."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.contract.settings.architectures import MatryoshkaSettings
from trainer.parallel.group import reduce_scatter
from trainer.saes.base import Declared, SaeSpec
from trainer.saes.batch_topk import BatchTopK
from trainer.saes.kernels.sparse import gradient_dtype
from trainer.saes.nested import Nested
from trainer.saes.sparse_acts import Acts, DenseActs, SparseActs


class MatryoshkaBatchTopK(Nested, BatchTopK):
    """A BatchTopK SAE in which the first d_sae / 2, d_sae / 4, … latents also reconstruct the target by themselves.

    The loss is the mean over the settings' `n_levels` prefixes of the latents, including the full dictionary. Small
    prefixes therefore learn general features, which more specific features would otherwise absorb.
    """

    traits = BatchTopK.traits._replace(losses=("mse", "inner_mse", "auxk"))
    settings: MatryoshkaSettings
    level_of: Tensor

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__(spec)
        # In a tiny dictionary, the smallest levels can have the same width.
        self.widths = sorted({-(-self.d_sae // 2**level) for level in range(self.settings.n_levels)})
        self.n_levels = len(self.widths)
        level_of = torch.bucketize(torch.arange(self.d_sae), torch.tensor(self.widths), right=True)
        self.declared["level_of"] = Declared(0)
        self.register_buffer("level_of", level_of, persistent=False)

    def _by_level(self, acts: SparseActs) -> SparseActs:
        """Regroup the activations by level; a token's entries are ordered by latent, and therefore by level."""
        bags = torch.add(acts.at(self.level_of), acts.indices.tokens, alpha=self.n_levels)
        return acts._replace(indices=acts.indices.regroup(bags, len(acts.indices.starts) * self.n_levels))

    def _parts(self, acts: Acts) -> Tensor:
        if isinstance(acts, SparseActs):
            return super()._parts(acts)
        return reduce_scatter(self._dense_parts(acts), self.latents.group, gradient_dtype(self.W_dec))

    def _dense_parts(self, acts: DenseActs) -> Tensor:
        sizes = self.level_of.bincount(minlength=self.n_levels).tolist()
        slices = zip(acts.values.split(sizes, dim=1), self.W_dec.split(sizes), strict=True)
        return torch.stack([values @ rows for values, rows in slices], dim=1)

"""BatchTopK SAE (Bussmann et al. 2024, arXiv 2412.06410)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.saes.kernels.encode import encode
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import Chosen, above
from trainer.saes.kernels.top_k_across_ranks import k_per_batch
from trainer.saes.sparse_acts import Acts
from trainer.saes.topk import TopK


class BatchTopK(TopK):
    """k latents per token on average: in training the largest of a whole micro-batch, of all ranks
    together, however they are spread.

    Outside training a token must not depend on its neighbours: there a latent is active above `threshold`, a running
    average of the smallest active value in a batch. In this form the SAE is exported, as a JumpReLU.
    """

    n_own_sums = 1

    threshold: Tensor

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        d_out: int | None = None,
        *,
        k: int,
        k_aux: int | None,
        auxk_alpha: float,
        threshold_rate: float,
        k_anneal_fraction: float = 0.0,
        k_anneal_start: int | None = None,
    ) -> None:
        super().__init__(
            d_in,
            d_sae,
            d_out,
            k=k,
            k_aux=k_aux,
            auxk_alpha=auxk_alpha,
            k_anneal_fraction=k_anneal_fraction,
            k_anneal_start=k_anneal_start,
        )
        self._threshold_rate = threshold_rate
        # 0 until the first batch.
        self.register_buffer("threshold", torch.zeros(()))

    def encode_latents(self, centred: Tensor) -> Acts:
        choose = self._largest if self.training else self._above_threshold
        pre_acts = encode(centred, self.W_enc, self.b_enc, self.input_bias, choose)
        active = pre_acts.values.relu()
        return pre_acts.with_values(active if self.training else active * (active > self.threshold))

    def _largest(self, pre_acts: PreActs) -> Chosen:
        return k_per_batch(pre_acts, self.k_now, self.batch_tokens, self.peers, may_wait=not self.W_enc.is_cuda)

    def _above_threshold(self, pre_acts: PreActs) -> Chosen | None:
        return above(pre_acts, self.threshold)

    @torch.no_grad()
    def count(self, acts: Acts, n_tokens: int, error: Tensor, *own: Tensor) -> None:
        if self.training:
            smallest = self.peers.gather(_smallest_active(acts.values)).amin()
            super().count(acts, n_tokens, error, n_tokens * smallest.nan_to_num(0.0, posinf=0.0), *own)

    def learn_from(self, sums: Tensor) -> None:
        super().learn_from(sums)
        n_tokens, smallest = sums[0], sums[2] / sums[0]
        average = torch.lerp(self.threshold, smallest, self._threshold_rate)
        # The first value is taken whole: an average with 0 would let too many through for long.
        new = torch.where(self.threshold > 0, average, smallest)
        torch.where(n_tokens > 0, new, self.threshold, out=self.threshold)

    def export_config(self) -> dict[str, Any]:
        return {"architecture": self.saelens_name("jumprelu")}

    def export_weights(self) -> dict[str, Tensor]:
        threshold = (self.threshold / self.acts_scale).expand(self.d_sae)
        return super().export_weights() | {"threshold": threshold}


def _smallest_active(values: Tensor) -> Tensor:
    """Return the smallest positive value, 0-dim; infinity where there is none."""
    positive = values.masked_fill(values <= 0, torch.inf)
    return positive.amin() if len(values) else values.new_full((), torch.inf)

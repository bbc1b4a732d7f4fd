"""BatchTopK SAE (Bussmann et al. 2024, arXiv 2412.06410)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.contract.settings.architectures import BatchTopKSettings, MatryoshkaSettings
from trainer.saes.auxk import Explained
from trainer.saes.base import Output, SaeSpec
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import Chosen, above
from trainer.saes.kernels.top_k_across_ranks import k_per_batch
from trainer.saes.losses import Errors
from trainer.saes.sparse_acts import Acts
from trainer.saes.topk import TopK

# Marks an unset threshold.
UNSET = -1.0


class BatchTopK(TopK):
    """An SAE with k latents per token on average; in training, it keeps a micro-batch's largest values over all ranks.

    Outside training, the result for a token must not depend on the other tokens, so a latent is active if its value
    exceeds a threshold. The SAE is exported in this form, as a JumpReLU. `threshold` is a running average of the
    smallest active value in each batch. This average is fitted to the training rows; on other rows, more latents exceed
    the threshold (36.4 per token for k = 32 on a small sample). Therefore, the three `set_thresholds`, fitted on
    held-out rows, take precedence. The first threshold applies to all rows. Each of the other two thresholds applies to
    one half of the held-out rows and was fitted on the other half, so no row is measured with a threshold fitted on it.
    """

    traits = TopK.traits._replace(n_own_sums=1)
    settings: BatchTopKSettings | MatryoshkaSettings
    threshold: Tensor
    set_thresholds: Tensor

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__(spec)
        # The threshold is 0 before the first batch.
        self.register_buffer("threshold", torch.zeros(()))
        # The thresholds are negative until they are set.
        self.register_buffer("set_thresholds", torch.full((3,), UNSET))
        self.register_load_state_dict_pre_hook(_without_set_thresholds)  # type: ignore[no-untyped-call]

    def _encode_latents(self, centred: Tensor) -> Acts:
        choose = self._largest if self.training else self._above_threshold
        pre_acts = self.encode_centred(centred, choose)
        active = pre_acts.values.relu()
        return pre_acts.with_values(active if self.training else active * (active > self.cut))

    def _largest(self, pre_acts: PreActs) -> Chosen:
        return k_per_batch(pre_acts, self.k_now, self.batch_tokens, self.peers, may_wait=not self.W_enc.is_cuda)

    def _above_threshold(self, pre_acts: PreActs) -> Chosen | None:
        return above(pre_acts, self.cut)

    @property
    def cut(self) -> Tensor:
        """The threshold used outside training, 0-dim."""
        chosen = self.set_thresholds[0 if self.held_out_half is None else 1 + self.held_out_half]
        return torch.where(chosen >= 0, chosen, self.threshold)

    @torch.no_grad()
    def pre_acts_of(self, x: Tensor) -> Tensor:
        """Return the pre-activations [n_tokens, n_own] of normalised x [n_tokens, d_in]."""
        return self.encode(x, lambda _: None).values

    def _score(self, explained: Explained | None, acts: Acts, x_hat: Tensor, errors: Errors) -> Output:
        output = super()._score(explained, acts, x_hat, errors)
        if not self.training:
            return output
        smallest = self.peers.gather(_smallest_active(acts.values.detach())).amin()
        return output._replace(own_sums=(len(x_hat) * smallest.nan_to_num(0.0, posinf=0.0),))

    def learn_from(self, sums: Tensor) -> None:
        super().learn_from(sums)
        n_tokens, smallest = sums[0], sums[2] / sums[0]
        average = torch.lerp(self.threshold, smallest, self.settings.threshold_rate)
        # Use the first value unchanged: averaging it with the initial 0 would leave too many latents active for a long
        # time.
        new = torch.where(self.threshold > 0, average, smallest)
        torch.where(n_tokens > 0, new, self.threshold, out=self.threshold)

    def export_config(self) -> dict[str, Any]:
        return {"architecture": self.saelens_name("jumprelu")}

    def export_weights(self) -> dict[str, Tensor]:
        threshold = (self.cut / self.acts_scale).expand(self.d_sae)
        return super().export_weights() | {"threshold": threshold}


def _without_set_thresholds(sae: BatchTopK, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Allow loading checkpoints from older versions, which lack `set_thresholds`."""
    state.setdefault(f"{prefix}set_thresholds", torch.full_like(sae.set_thresholds, UNSET))


def _smallest_active(values: Tensor) -> Tensor:
    """Return the smallest positive value, 0-dim, or infinity if no value is positive."""
    positive = values.masked_fill(values <= 0, torch.inf)
    return positive.amin() if len(values) else values.new_full((), torch.inf)

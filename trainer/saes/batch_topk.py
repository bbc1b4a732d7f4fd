"""BatchTopK SAE (Bussmann et al. 2024, arXiv 2412.06410)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.contract.settings.architectures import BatchTopKSettings, MatryoshkaSettings
from trainer.runtime.narrow_copy import kept_or_own
from trainer.saes.auxk import Explained
from trainer.saes.base import Output, SaeSpec
from trainer.saes.kernels.encode import centre, encode
from trainer.saes.kernels.pre_acts import PreActs, Product
from trainer.saes.kernels.select import Chosen, above
from trainer.saes.kernels.top_k_across_ranks import k_per_batch, k_per_batch_of_layers
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
        self._widths: tuple[int, ...] = ()
        # The latents that the next training pass keeps, if they were chosen together with those of other layers.
        self._kept: Chosen | None = None

    def _encode_latents(self, centred: Tensor) -> Acts:
        choose = self._largest if self.training else self._above_threshold
        norms = self.rank_norms()
        if norms is None:
            pre_acts = self.encode_centred(centred, choose)
        else:
            weights = self.W_enc * norms, self.b_enc * norms
            pre_acts = encode(centred, *weights, self.input_bias, choose)
        active = pre_acts.values.relu()
        acts = pre_acts.with_values(active if self.training else active * (active > self.cut))
        return acts if norms is None else acts.with_values(acts.values / acts.at(norms))

    @torch.no_grad()
    def rank_norms(self) -> Tensor | None:
        """Return the factors [d_sae] that activations are multiplied with to rank them; None if all are 1.

        The decoder rows of a crosscoder have unit norm, but the sum of the norms of their parts is larger if several
        parts share the latent.
        """
        if self.part_widths is None or getattr(self.settings, "rank_by", "sae") == "sae":
            return None
        # Read the widths once, since reading them from a GPU would make the host wait in every step.
        self._widths = self._widths or tuple(self.part_widths.tolist())
        parts = self.W_dec.split(self._widths, dim=1)
        return torch.stack([part.norm(dim=1) for part in parts]).sum(0)

    @property
    def shares_k(self) -> bool:
        """Whether the layers of a cross-layer transcoder share k."""
        return getattr(self.settings, "share_k", False)

    def _largest(self, pre_acts: PreActs) -> Chosen:
        if self._kept is not None:
            kept, self._kept = self._kept, None
            return kept
        return k_per_batch(pre_acts, self.k_now, self.batch_tokens, self.peers, may_wait=not self.W_enc.is_cuda)

    def _pre_acts(self, x: Tensor) -> PreActs:
        centred = centre(x, self.input_bias)
        return Product(centred, kept_or_own(self.W_enc, centred.dtype), self.b_enc)

    def _above_threshold(self, pre_acts: PreActs) -> Chosen | None:
        return above(pre_acts, self.cut)

    @property
    def cut(self) -> Tensor:
        """The threshold used outside training, 0-dim."""
        chosen = self.set_thresholds[0 if self.held_out_half is None else 1 + self.held_out_half]
        return torch.where(chosen >= 0, chosen, self.threshold)

    @torch.no_grad()
    def pre_acts_of(self, x: Tensor) -> Tensor:
        """Return the values [n_tokens, n_own] that the threshold applies to, for normalised x [n_tokens, d_in]."""
        pre_acts, norms = self.encode(x, lambda _: None).values, self.rank_norms()
        return pre_acts if norms is None else pre_acts * norms

    def _score(self, explained: Explained | None, acts: Acts, x_hat: Tensor, errors: Errors) -> Output:
        output = super()._score(explained, acts, x_hat, errors)
        if not self.training:
            return output
        norms = self.rank_norms()
        ranked = acts.values.detach() if norms is None else acts.values.detach() * acts.at(norms)
        smallest = self.peers.gather(_smallest_active(ranked)).amin()
        return output._replace(own_sums=(len(x_hat) * smallest.nan_to_num(0.0, posinf=0.0),))

    def learn_from(self, sums: Tensor) -> None:
        super().learn_from(sums)
        n_tokens, smallest = sums[0], sums[2] / sums[0]
        average = torch.lerp(self.threshold, smallest, self.settings.threshold_rate)
        # Use the first value unchanged: averaging it with the initial 0 would leave too many latents active for a long
        # time.
        new = torch.where(self.threshold > 0, average, smallest)
        counts = n_tokens > 0
        if self.shares_k:
            # A layer that shares k may have no active latent in a batch.
            counts = counts & (smallest > 0)
        torch.where(counts, new, self.threshold, out=self.threshold)

    def export_config(self) -> dict[str, Any]:
        return {"architecture": self.saelens_name("jumprelu")}

    def export_weights(self) -> dict[str, Tensor]:
        norms = self.rank_norms()
        threshold = (self.cut / self.acts_scale).expand(self.d_sae)
        threshold = threshold if norms is None else threshold / norms
        return super().export_weights() | {"threshold": threshold}


@torch.no_grad()
def choose_together(layers: Sequence[BatchTopK], inputs: Sequence[Tensor]) -> None:
    """Choose the largest pre-activations over all layers; the next training pass of each layer keeps its share of them.

    `inputs` are the layers' normalised rows, [n_tokens, d_in] each. The number of chosen values is the sum of k over
    the layers, times the number of tokens.
    """
    one = layers[0]
    n_tokens = one.batch_tokens if one.peers.size > 1 else len(inputs[0])
    pre_acts = [partial(layer._pre_acts, x) for layer, x in zip(layers, inputs, strict=True)]
    k = sum(layer.k_now for layer in layers)
    # A GPU would otherwise have to keep k · n_tokens entries for every layer, 2.5 GB for 26 layers and 4,096 tokens.
    kept = k_per_batch_of_layers(pre_acts, k, n_tokens, one.peers, may_wait=True)
    for layer, own in zip(layers, kept, strict=True):
        layer._kept = own


def _without_set_thresholds(sae: BatchTopK, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Allow loading checkpoints from older versions, which lack `set_thresholds`."""
    state.setdefault(f"{prefix}set_thresholds", torch.full_like(sae.set_thresholds, UNSET))


def _smallest_active(values: Tensor) -> Tensor:
    """Return the smallest positive value, 0-dim, or infinity if no value is positive."""
    positive = values.masked_fill(values <= 0, torch.inf)
    return positive.amin() if len(values) else values.new_full((), torch.inf)

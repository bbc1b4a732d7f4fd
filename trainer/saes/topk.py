"""TopK SAE (Gao et al. 2024, arXiv 2406.04093)."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.settings.architectures import (
    BatchTopKSettings,
    HierarchicalTopKSettings,
    MatryoshkaSettings,
    TopKSettings,
)
from trainer.saes.auxk import AuxK, Explained
from trainer.saes.base import Output, Sae, SaeSpec, Traits
from trainer.saes.kernels.encode import centre
from trainer.saes.kernels.pre_acts import PreActs
from trainer.saes.kernels.select import Chosen
from trainer.saes.kernels.top_k_across_ranks import k_per_token
from trainer.saes.losses import Errors
from trainer.saes.sparse_acts import Acts


class TopK(Sae):
    """An SAE that keeps the k largest activations of each token; dead latents learn to reconstruct the error.

    During the first `k_anneal_fraction` of the run, the number of latents per token decreases linearly from
    `k_anneal_start` (d_in if None) to k. Evaluation always uses k.
    """

    settings: TopKSettings | HierarchicalTopKSettings | BatchTopKSettings | MatryoshkaSettings
    # With a lower `revived_share`, a revived latent's activation would never be among the k largest.
    traits = Traits(losses=("mse", "auxk"), revived_share=1.0, reads_narrow=True)

    def __init__(self, spec: SaeSpec) -> None:
        super().__init__(spec)
        self.k, d_sae = self.settings.k, self.d_sae
        if self.k > d_sae:
            raise UserError(f"sae.k: must be at most the number of latents, {d_sae}, not {self.k}")
        self._anneal_start = min(self.settings.k_anneal_start or self.d_in, d_sae)
        self.k_now = float(self.k)
        self.auxk = AuxK(self, self.settings.k_aux, self.settings.auxk_alpha)

    @contextlib.contextmanager
    def using(self, k: int) -> Iterator[None]:
        """Within the context, evaluate with a different k."""
        own, self.k = self.k, k
        try:
            yield
        finally:
            self.k = own

    def begin_step(self, progress: float) -> Hashable:
        fraction = self.settings.k_anneal_fraction
        share = min(1.0, progress / fraction) if fraction else 1.0
        self.k_now = self._anneal_start + share * (self.k - self._anneal_start)
        return self.k_now

    def forward(self, x: Tensor, y: Tensor) -> Output:
        centred = centre(x, self.input_bias)
        acts, explained = self._encode_and_explain(centred)
        return self._score(explained, acts, *self.reconstruct(acts, x, y))

    def _encode_and_explain(self, centred: Tensor) -> tuple[Acts, Explained | None]:
        """Return the activations of x − input_bias [n_tokens, d_in], and the dead latents' reconstruction of the error.

        Ranks that share latents exchange the dead latents' weights while encoding. Autograd runs in the reverse order,
        so the ranks exchange these weights' gradients during the encoder's backward pass. A replica that holds all
        latents may still be receiving W_dec while it encodes, so it reads the dead latents' rows only after encoding.
        """
        exchanges = self.latents.group.size > 1
        candidates = self.auxk.candidates(self, centred.dtype) if exchanges else None
        acts = self._encode_latents(centred)
        if not exchanges:
            candidates = self.auxk.candidates(self, centred.dtype)
        return acts, self.auxk.explain(self, centred, candidates)

    def _encode_latents(self, centred: Tensor) -> Acts:
        """Return the activations of the latents selected for x − input_bias [n_tokens, d_in]."""
        k = round(self.k_now) if self.training else self.k
        pre_acts = self.encode_centred(centred, partial(self._choose, k=k))
        return pre_acts.with_values(pre_acts.values.relu())

    def _choose(self, pre_acts: PreActs, k: int) -> Chosen:
        return k_per_token(pre_acts, k, self.latents.group, may_wait=not self.W_enc.is_cuda)

    def _score(self, explained: Explained | None, acts: Acts, x_hat: Tensor, errors: Errors) -> Output:
        """Compute the loss terms from the activations and x_hat, and return the output of the forward pass."""
        losses = {"mse": errors.square, "auxk": self.auxk.loss(errors.each, explained)}
        return Output(acts, x_hat, losses, errors.sums)

    def objective(self, losses: dict[str, Tensor]) -> Tensor:
        """Return the squared error divided by the data's variance, so that any data scale works, plus the AuxK loss."""
        return torch.add(losses["mse"] / self.y_variance, losses["auxk"], alpha=self.auxk.alpha)

    def learn_from(self, sums: Tensor) -> None:
        self.auxk.learn_from(sums)

    def export_config(self) -> dict[str, Any]:
        return {"architecture": self.saelens_name("topk"), "k": self.k, "rescale_acts_by_decoder_norm": False}

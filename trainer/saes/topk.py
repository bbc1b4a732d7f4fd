"""TopK SAE with AuxK (Gao et al. 2024, arXiv 2406.04093)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainer.losses import auxk_error, squared_error
from trainer.saes.base import Output, Sae
from trainer.saes.sparse import decode, encode_topk


class TopK(Sae):
    """Exactly k latents per token; those that never fire learn to explain what is left over."""

    loss_names = ("mse", "auxk")
    residual_variance: Tensor
    _step_sums: Tensor

    def __init__(
        self,
        d_in: int,
        d_sae: int,
        *,
        k: int,
        k_aux: int | None,
        auxk_alpha: float,
        dead_after_tokens: int,
    ) -> None:
        super().__init__(d_in, d_sae)
        self.k = k
        self.k_aux = min(k_aux or max(1, d_in // 2), d_sae)
        self.auxk_alpha = auxk_alpha
        self.dead_after_tokens = dead_after_tokens
        # No latent has been silent for longer, in tokens; the host knows this much without asking the device.
        self._longest_silence = 0
        self.register_load_state_dict_post_hook(lambda *_: self._read_longest_silence())
        self.register_buffer("residual_variance", torch.ones(()))
        # The tokens each latent fired on, then Σ‖x − x_hat‖²: one tensor, so that it crosses the wire in one go.
        self.register_buffer("_step_sums", torch.zeros(d_sae + 1), persistent=False)

    def forward(self, x: Tensor) -> Output:
        acts = encode_topk(x, self.W_enc, self.b_enc, self.b_dec, self.k)
        x_hat = decode(acts, self.W_dec, self.b_dec)
        losses = {"mse": squared_error(x, x_hat), "auxk": self._auxk(x, x_hat)}
        if self.training:
            fired = (acts.values.detach() > 0).to(self._step_sums.dtype)
            self._step_sums.index_add_(0, acts.indices.flatten(), fired.flatten())
            self._step_sums[-1] += losses["mse"].detach()
        return Output(acts, x_hat, losses)

    def objective(self, losses: dict[str, Tensor]) -> Tensor:
        """The squared error in units of the data's variance, so that lr and clipping suit data of any scale."""
        return losses["mse"] / self.x_variance + self.auxk_alpha * losses["auxk"]

    def _auxk(self, x: Tensor, x_hat: Tensor) -> Tensor:
        """The AuxK term; 0 where the host can tell that nothing is dead, without asking the device."""
        if not self.auxk_alpha or not self.training or not self._may_have_dead():
            return x.new_zeros(())
        return auxk_error(x - x_hat, self._explain_by_dead(x), self.residual_variance) * self.dead().any()

    def _may_have_dead(self) -> bool:
        if self.n_tokens_since_fired.is_cuda:
            return self._longest_silence >= self.dead_after_tokens
        return bool(self.dead().any())

    def _read_longest_silence(self) -> None:
        self._longest_silence = int(self.n_tokens_since_fired.max())

    def _explain_by_dead(self, x: Tensor) -> Tensor:
        """A reconstruction [n_tokens, d_in] from each token's k_aux strongest dead latents.

        At most 2·k_aux latents, those silent for longest, are candidates: a fixed number needs no answer from
        the device, and their dense products stay a small part of the step however many are dead.
        """
        silence, candidates = self.n_tokens_since_fired.topk(min(2 * self.k_aux, self.d_sae))
        alive = silence < self.dead_after_tokens
        pre_acts = torch.addmm(self.b_enc[candidates], x - self.b_dec, self.W_enc[:, candidates])
        pre_acts = pre_acts.masked_fill(alive, -torch.inf)
        chosen = pre_acts.topk(min(self.k_aux, len(candidates)), dim=1, sorted=False).indices
        acts = torch.zeros_like(pre_acts).scatter(1, chosen, pre_acts.gather(1, chosen).relu())
        return acts @ self.W_dec[candidates]

    def dead(self) -> Tensor:
        return self.n_tokens_since_fired >= self.dead_after_tokens

    def step_sums(self) -> Tensor:
        return self._step_sums

    @torch.no_grad()
    def end_step(self, n_tokens: int) -> None:
        """Counts silence in tokens of all ranks; the residual's variance serves the next step.

        This step's would need a second exchange between ranks before the backward pass; b_dec keeps the
        residual's mean near 0, so that its mean square is its variance.
        """
        fired = self._step_sums[:-1] > 0
        self.n_tokens_since_fired.add_(n_tokens).masked_fill_(fired, 0)
        self.residual_variance.copy_((self._step_sums[-1] / n_tokens).clamp_min(1e-12))
        self._step_sums.zero_()
        self._longest_silence += n_tokens

    def export_config(self) -> dict[str, Any]:
        return {"architecture": "topk", "k": self.k, "rescale_acts_by_decoder_norm": False}

"""What an SAE architecture answers; the training loop does the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.saes.sparse import SparseActs


class Output(NamedTuple):
    """One forward pass: `acts`, the reconstruction `x_hat` [n_tokens, d_in], and loss terms as sums over tokens."""

    acts: SparseActs
    x_hat: Tensor
    losses: dict[str, Tensor]


class Sae(nn.Module, ABC):
    """An SAE with unit decoder rows; a subclass adds an encoder, its loss and its export.

    `x_mean` [d_in] and `x_variance` (total, per token) are those of a sample of the data and stay fixed,
    so that neither loss nor gradient depends on how a batch is split.
    """

    loss_names: tuple[str, ...] = ("mse",)
    x_mean: Tensor
    x_variance: Tensor
    n_tokens_since_fired: Tensor

    def __init__(self, d_in: int, d_sae: int) -> None:
        super().__init__()
        self.d_in, self.d_sae = d_in, d_sae
        self.W_enc = nn.Parameter(torch.zeros(d_in, d_sae))
        self.b_enc = nn.Parameter(torch.zeros(d_sae))
        self.W_dec = nn.Parameter(torch.zeros(d_sae, d_in))
        self.b_dec = nn.Parameter(torch.zeros(d_in))
        self.register_buffer("x_mean", torch.zeros(d_in))
        self.register_buffer("x_variance", torch.ones(()))
        self.register_buffer("n_tokens_since_fired", torch.zeros(d_sae, dtype=torch.int64))

    @abstractmethod
    def forward(self, x: Tensor) -> Output:
        """Encodes and decodes x [n_tokens, d_in]; in training also counts into `step_sums`."""

    @abstractmethod
    def objective(self, losses: dict[str, Tensor]) -> Tensor:
        """What to minimise, as a sum over the same tokens as `losses`."""

    @abstractmethod
    def step_sums(self) -> Tensor:
        """Sums of this step so far, to be added over all ranks in place before `end_step`."""

    @abstractmethod
    def end_step(self, n_tokens: int) -> None:
        """Takes in the sums of all ranks over the step's `n_tokens` tokens and clears them."""

    @abstractmethod
    def dead(self) -> Tensor:
        """Which latents count as dead, bool [d_sae]; the same on every rank."""

    @abstractmethod
    def export_config(self) -> dict[str, Any]:
        """The keys of SAELens' cfg.json that are this architecture's own."""

    @torch.no_grad()
    def project_gradient(self) -> None:
        """Removes what would only change the norm of a decoder row, before Adam's moments see it."""
        if self.W_dec.grad is not None:
            parallel = (self.W_dec.grad * self.W_dec).sum(dim=1, keepdim=True)
            self.W_dec.grad.addcmul_(parallel, self.W_dec, value=-1)

    @torch.no_grad()
    def normalise_decoder(self) -> None:
        """Brings every row of W_dec back to length 1."""
        self.W_dec.div_(self.W_dec.norm(dim=1, keepdim=True))

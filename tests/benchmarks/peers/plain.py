"""Simple training loops, sparse and dense."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.base import Recipe, Seen, Setup


class PlainSparse(Recipe):
    """A simple sparse loop: tied initial weights with unit rows, b_dec at the mean, Adam at the published rate.

    Only the encoder matmul is dense. Weight gradients are computed from active latents only.
    """

    name = "plain sparse loop"
    is_peer = writes_sae = False

    def __init__(self, setup: Setup, sample: Tensor) -> None:
        W_dec = F.normalize(torch.randn(setup.d_sae, setup.d_in), dim=1)
        # W_enc has the layout of W_dec, because fused Adam reads a gradient's memory in the parameter's order and would
        # misread the transposed result of a sparse matmul.
        weights = W_dec.clone(), torch.zeros(setup.d_sae), W_dec, sample.mean(dim=0)
        self._weights = [nn.Parameter(weight.to(setup.device)) for weight in weights]
        self._lr = 2e-4 * (2**14 / setup.d_sae) ** 0.5
        self._optimizer = torch.optim.Adam(self._weights, lr=self._lr, fused=True)
        self._setup, self._n_done = setup, 0

    def step(self, x: Tensor) -> None:
        self._n_done += 1
        self._optimizer.param_groups[0]["lr"] = self._lr * min(1.0, self._n_done / self._setup.short(1000))
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._setup.bf16):
            self._differentiate(x)
        self._optimizer.step()
        self._optimizer.zero_grad()
        W_dec = self._weights[2].data
        W_dec /= W_dec.norm(dim=1, keepdim=True)

    @torch.no_grad()
    def _differentiate(self, x: Tensor) -> None:
        """Compute the gradient of the mean squared error, and store it in the weights."""
        W_enc, b_enc, W_dec, b_dec = self._weights
        values, latents = self._encode(x)
        x_hat = F.embedding_bag(latents, W_dec, per_sample_weights=values, mode="sum") + b_dec
        grad = (x_hat - x) * (2 / len(x))
        active = self._csr(torch.zeros_like(values), latents)
        grad_values = torch.sparse.sampled_addmm(active, grad, W_dec.T, beta=0).values().view_as(values) * (values > 0)
        W_dec.grad = (self._csr(values, latents).t() @ grad).to(W_dec.dtype)
        W_enc.grad = (self._csr(grad_values, latents).t() @ (x - b_dec)).to(W_enc.dtype)
        b_enc.grad = torch.zeros_like(b_enc).index_add_(0, latents.flatten(), grad_values.flatten().to(b_enc.dtype))
        b_dec.grad = grad.sum(dim=0) - (b_enc.grad @ W_enc).to(b_dec.dtype)

    def _csr(self, values: Tensor, latents: Tensor) -> Tensor:
        starts = torch.arange(0, latents.numel() + 1, latents.shape[1], device=latents.device)
        return torch.sparse_csr_tensor(
            starts, latents.flatten(), values.flatten(), (len(latents), self._setup.d_sae), check_invariants=False
        )

    def _encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        W_enc, b_enc, _, b_dec = self._weights
        values, latents = F.linear(x - b_dec, W_enc, b_enc).topk(self._setup.k, dim=1, sorted=False)
        return values.float().relu(), latents

    def reconstruct(self, x: Tensor) -> Seen:
        values, latents = self._encode(x)
        acts = values.new_zeros(len(x), self._setup.d_sae).scatter(1, latents, values)
        return Seen(acts @ self._weights[2] + self._weights[3], acts > 0)


class PlainDense(PlainSparse):
    """A simple dense loop: `PlainSparse` with autograd through a dense decoder."""

    name = "plain dense loop"

    def _differentiate(self, x: Tensor) -> None:
        (self.reconstruct(x).x_hat - x).square().sum(dim=1).mean().backward()

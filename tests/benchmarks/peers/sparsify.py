"""Recipes for sparsify (EleutherAI)."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.base import Recipe, Seen, Setup


class Sparsify(Recipe):
    """The training step of `Trainer.fit` with the default optimizer; `fit` itself requires a language model."""

    name, package, module = "sparsify topk Signum", "eai-sparsify", "sparsify"
    has_rate = True

    def __init__(self, setup: Setup, sample: Tensor) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            from sparsify import SparseCoder, SparseCoderConfig
        config = SparseCoderConfig(num_latents=setup.d_sae, k=setup.k)
        self.sae = SparseCoder(setup.d_in, config, setup.device, dtype=torch.float32)
        self._started = False
        self._build_optimizer(setup)
        self._tokens_since_fired = torch.zeros(setup.d_sae, dtype=torch.long, device=setup.device)

    def _build_optimizer(self, setup: Setup) -> None:
        from schedulefree import ScheduleFreeWrapper
        from sparsify.sign_sgd import SignSGD

        groups = [dict(params=self.sae.parameters(), lr=setup.rate * 5e-3 / (setup.d_sae / 2**14) ** 0.5)]
        self._optimizer: Any = ScheduleFreeWrapper(SignSGD(groups), momentum=0.95)
        self._optimizer.train()

    def step(self, x: Tensor) -> None:
        if not self._started:
            self._started, self.sae.b_dec.data = True, x.mean(0)
        self.sae.set_decoder_norm_to_unit_norm()
        out = self.sae(x=x, y=x, dead_mask=None, total_variance=(x - x.mean(0)).pow(2).sum())
        fired = torch.zeros_like(self._tokens_since_fired, dtype=torch.bool)
        fired[out.latent_indices.flatten()] = True
        float(out.fvu.detach())  # sparsify reads the loss at every step, which makes the host wait for a GPU
        (out.fvu + out.multi_topk_fvu / 8).backward()
        self.sae.remove_gradient_parallel_to_decoder_directions()
        self._update()
        self._tokens_since_fired += len(x)
        self._tokens_since_fired[fired] = 0

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def reconstruct(self, x: Tensor) -> Seen:
        with self._with_averaged_weights():
            out = self.sae(x)
        active = torch.zeros(len(x), self.sae.num_latents, dtype=torch.bool, device=x.device)
        return Seen(out.sae_out, active.scatter(1, out.latent_indices, out.latent_acts > 0))

    def save(self, folder: Path) -> None:
        with self._with_averaged_weights():
            self.sae.save_to_disk(folder)

    @contextlib.contextmanager
    def _with_averaged_weights(self) -> Iterator[None]:
        """In the `with` block, use the weights that the library would save, which are averages over steps."""
        self._optimizer.eval()
        yield
        self._optimizer.train()


class SparsifyAdam(Sparsify):
    """Adam at 2e-4·√(2¹⁴/d_sae) with a linear decay to 0, as with `--optimizer adam` without bitsandbytes."""

    name = "sparsify topk Adam"

    def _build_optimizer(self, setup: Setup) -> None:
        from transformers import get_linear_schedule_with_warmup

        groups = [dict(params=self.sae.parameters(), lr=setup.rate * 2e-4 / (setup.d_sae / 2**14) ** 0.5)]
        self._optimizer = torch.optim.Adam(groups)
        self._schedule = get_linear_schedule_with_warmup(self._optimizer, setup.short(1000), setup.n_steps)

    def _update(self) -> None:
        super()._update()
        self._schedule.step()

    def _with_averaged_weights(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

"""Recipes for SAELens (decoderesearch)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from torch import Tensor

from peers.base import Recipe, Seen, Setup


class SaeLensTopK(Recipe):
    """`SAETrainer.step` on a training SAE: no normalisation, decoder of norm 0.1, Adam at 3e-4, clipping to 1."""

    name, package, module = "SaeLens topk", "sae-lens", "sae_lens"
    sae_class = "topk_sae:TopKTrainingSAE"

    def __init__(self, setup: Setup, sample: Tensor) -> None:
        from sae_lens.config import SAETrainerConfig
        from sae_lens.training.sae_trainer import SAETrainer

        module, _, name = self.sae_class.partition(":")
        saes: Any = importlib.import_module(f"sae_lens.saes.{module}")
        shape = dict(d_in=setup.d_in, d_sae=setup.d_sae, k=setup.k, device=setup.device)
        self.sae = getattr(saes, name)(getattr(saes, f"{name}Config")(**shape, **self._own(setup)))
        config = SAETrainerConfig(
            total_training_samples=setup.n_steps * setup.batch_size,
            train_batch_size_samples=setup.batch_size,
            lr_end=3e-5,  # the runner's default, which has no effect on a constant schedule
            device=setup.device,
            autocast=setup.bf16,
        )
        self._trainer: Any = SAETrainer(config, self.sae, data_provider=iter(()))

    def _own(self, setup: Setup) -> dict[str, Any]:
        """Return the settings that only this kind of SAE needs."""
        return {}

    def step(self, x: Tensor) -> None:
        self._trainer.maybe_reset_sparsity()
        self._trainer.step(x)
        self._trainer.n_training_steps += 1

    def reconstruct(self, x: Tensor) -> Seen:
        acts = self.sae.encode(x)
        return Seen(self.sae.decode(acts), acts > 0)

    def save(self, folder: Path) -> None:
        self.sae.save_inference_model(folder)


class SaeLensBatchTopK(SaeLensTopK):
    """BatchTopK, evaluated as the JumpReLU SAE it becomes on export: a learned threshold selects latents."""

    name, kind = "SaeLens batchtopk", "batchtopk"
    sae_class = "batchtopk_sae:BatchTopKTrainingSAE"

    def reconstruct(self, x: Tensor) -> Seen:
        _, pre_acts = self.sae.encode_with_hidden_pre(x)
        acts = pre_acts.relu() * (pre_acts > self.sae.topk_threshold)
        return Seen(self.sae.decode(acts), acts > 0)

    def reconstruct_at_k(self, x: Tensor) -> Seen:
        return super().reconstruct(x)


class SaeLensMatryoshka(SaeLensBatchTopK):
    name = "SaeLens matryoshka"
    sae_class = "matryoshka_batchtopk_sae:MatryoshkaBatchTopKTrainingSAE"

    def _own(self, setup: Setup) -> dict[str, Any]:
        return {"matryoshka_widths": setup.prefix_widths}

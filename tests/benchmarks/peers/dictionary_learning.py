"""Recipes for dictionary_learning (Marks, Karvonen, Mueller)."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.base import Recipe, Seen, Setup


class DictionaryLearningTopK(Recipe):
    """`TopKTrainer.update`: b_dec from the first batch's geometric median, unit decoder, AuxK, Adam, clipping to 1."""

    name, package, module = "dictionary_learning topk", "dictionary-learning", "dictionary_learning"
    trainer_class = "top_k:TopKTrainer"

    def __init__(self, setup: Setup, sample: Tensor) -> None:
        module, _, name = self.trainer_class.partition(":")
        trainers = importlib.import_module(f"dictionary_learning.trainers.{module}")
        self._trainer: Any = getattr(trainers, name)(
            steps=setup.n_steps,
            activation_dim=setup.d_in,
            dict_size=setup.d_sae,
            k=setup.k,
            layer=0,
            lm_name="",
            warmup_steps=setup.short(1000),
            threshold_start_step=setup.short(1000),
            device=setup.device,
            **self._own(setup),
        )
        self._setup, self._n_done = setup, 0

    def _own(self, setup: Setup) -> dict[str, Any]:
        """Return the settings that only this kind of SAE needs."""
        return {}

    def step(self, x: Tensor) -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._setup.bf16):
            self._trainer.update(self._n_done, x)
        self._n_done += 1

    def reconstruct(self, x: Tensor) -> Seen:
        x_hat, acts = self._trainer.ae(x, output_features=True)
        return Seen(x_hat, acts > 0)

    def save(self, folder: Path) -> None:
        """Write the files that the library's `training.py` writes at the end."""
        torch.save(self._trainer.ae.state_dict(), folder / "ae.pt")
        (folder / "config.json").write_text(json.dumps({"trainer": self._trainer.config}, default=str))


class DictionaryLearningBatchTopK(DictionaryLearningTopK):
    """BatchTopK; the threshold is an average over about 1,000 steps and lags behind the weights in a short run."""

    name, kind = "dictionary_learning batch_topk", "batchtopk"
    trainer_class = "batch_top_k:BatchTopKTrainer"

    def reconstruct_at_k(self, x: Tensor) -> Seen:
        acts = self._trainer.ae.encode(x, use_threshold=False)
        return Seen(self._trainer.ae.decode(acts), acts > 0)


class DictionaryLearningMatryoshka(DictionaryLearningBatchTopK):
    name = "dictionary_learning matryoshka"
    trainer_class = "matryoshka_batch_top_k:MatryoshkaBatchTopKTrainer"

    def _own(self, setup: Setup) -> dict[str, Any]:
        bounds = itertools.pairwise([0, *setup.prefix_widths])
        return {"group_fractions": [(wide - narrow) / setup.d_sae for narrow, wide in bounds]}

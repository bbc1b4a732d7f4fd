"""Recipes for our trainer with its default settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.base import Recipe, Seen, Setup, largest


class Ours(Recipe):
    """Our trainer, with only the architecture, d_sae, k, batch size and number of steps set."""

    name, package, module = "ours topk", "sae-tui", "trainer"
    architecture = "topk"
    is_peer = False

    # This is the only recipe whose methods depend on `trainer` internals.
    def __init__(self, setup: Setup, sample: Tensor) -> None:
        from trainer.contract.settings.job_file import parse_job
        from trainer.parallel.base import Parallel
        from trainer.training.graph_replay import replay_for
        from trainer.training.learner import Learner

        train: dict[str, Any] = {"batch_size": setup.batch_size, "n_steps": setup.n_steps, "seed": setup.seed}
        if setup.own_steps:
            train = {"n_tokens": setup.n_tokens, "seed": setup.seed}
        train["precision"] = "bf16" if setup.bf16 else "fp32"
        sae = {"architecture": self.architecture, "d_sae": setup.d_sae, "k": setup.k}
        job, problems = parse_job({"data": {"path": "unused"}, "sae": sae, "train": train})
        assert job is not None, problems
        self._parallel = Parallel(torch.device(setup.device))
        self._learner = Learner(job, setup.d_in, None, self._parallel)
        self._learner.initialise(sample, sample)
        self._learner.whole_steps = replay_for(self._learner, job, self._parallel)
        self._setup, self._n_done = setup, 0

    def steps_of(self, setup: Setup) -> tuple[int, int]:
        return self._learner.tokens_per_step, self._learner.schedule.total_steps

    def step(self, x: Tensor) -> None:
        from trainer.activations.batches import Batch
        from trainer.training.step import take_step

        take_step([self._learner], self._parallel, self._n_done, [Batch([(x, x)], len(x))])
        self._n_done += 1

    def reconstruct(self, x: Tensor) -> Seen:
        weights, acts = self._encode(x)
        if "threshold" in weights:
            return self._decode(weights, acts * (acts > weights["threshold"]))
        return self._decode(weights, largest(acts, self._setup.k))

    def reconstruct_at_k(self, x: Tensor) -> Seen:
        if self.kind == "topk":
            return self.reconstruct(x)
        weights, acts = self._encode(x)
        return self._decode(weights, largest(acts.view(1, -1), self._setup.k * len(x)).view_as(acts))

    def save(self, folder: Path) -> None:
        from trainer.sharing.saelens import export_sae

        with self._learner.evaluating():
            export_sae(self._learner.sae, folder, {"training_architecture": self.architecture})

    def _encode(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        weights = self._learner.sae.export_weights()
        return weights, torch.addmm(weights["b_enc"], x - weights["b_dec"], weights["W_enc"]).relu()

    def _decode(self, weights: dict[str, Tensor], acts: Tensor) -> Seen:
        return Seen(acts @ weights["W_dec"] + weights["b_dec"], acts > 0)


class OursBatchTopK(Ours):
    name, kind = "ours batchtopk", "batchtopk"
    architecture = "batch_topk"

    @classmethod
    def missing(cls) -> str | None:
        if lacking := super().missing():
            return lacking
        from trainer.contract.settings.catalog import ARCHITECTURES

        return None if cls.architecture in ARCHITECTURES else f"no architecture {cls.architecture} yet"


class OursMatryoshka(OursBatchTopK):
    name, architecture = "ours matryoshka", "matryoshka_batch_topk"

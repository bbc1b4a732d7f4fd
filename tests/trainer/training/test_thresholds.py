"""Checks thresholds set on held-out rows against sorting, and tests checkpoints that predate such thresholds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trainer.activations.training_data import HALVES
from trainer.contract.settings.job import JobConfig
from trainer.evaluation.exported import ExportedSae, read_exported
from trainer.parallel.base import Parallel
from trainer.parallel.threads import on_all
from trainer.saes.batch_topk import BatchTopK
from trainer.training.learner import Learner
from trainer.training.loop import Trainer
from trainer.training.thresholds import count_values, set_thresholds, threshold_for

MakeTrainer = Callable[..., Trainer]


def active_above(values: Tensor, threshold: float) -> int:
    return int((values > threshold).sum())


@given(st.lists(st.integers(-64, 512), min_size=1, max_size=200), st.integers(1, 9), st.integers(1, 20))
def test_no_other_threshold_is_closer_to_the_requested_l0(eighths: list[int], k: int, n_rows: int) -> None:
    # Distinct values differ by more than a bin width, and many values occur several times.
    values = torch.tensor(eighths) / 8
    counts = torch.zeros_like(count_values(values), dtype=torch.float64)
    for part in values.split(7):
        counts += count_values(part)
    threshold = threshold_for(counts, n_rows, k)
    best = min(abs(active_above(values, one) - k * n_rows) for one in [0.0, *(values - 1 / 16).clamp(min=0).tolist()])
    assert threshold >= 0
    assert abs(active_above(values, threshold) - k * n_rows) == best


def l0_of(sae: ExportedSae, x: Tensor) -> float:
    return float((sae.encode(x).values > 0).sum()) / len(x)


def test_no_threshold_is_set_if_there_are_no_rows() -> None:
    assert threshold_for(count_values(torch.zeros(0)).double(), 0, 4) < 0


def test_an_exported_sae_has_the_requested_l0_on_held_out_rows_and_on_each_half(
    make_job: Callable[..., JobConfig], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    job = make_job(
        sae={"architecture": ["batch_topk", "matryoshka_batch_topk"], "k": 4},
        data={"held_out_tokens": 401},
        train={"precision": "fp32"},
    )
    trainer = make_trainer(job, output=tmp_path / "sae")
    trainer.run()
    rows = trainer.data.of_hook(0)
    halves = [torch.cat([x for x, _ in rows.held_out(64, half)]).float() for half in HALVES]
    for label, learner in trainer.learners.items():
        sae, exported = learner.sae, read_exported(tmp_path / "sae" / label, torch.device("cpu"))
        assert isinstance(sae, BatchTopK)

        l0 = partial(l0_of, exported)
        assert l0(torch.cat(halves)) == pytest.approx(4, rel=0.01)
        # The threshold learnt in training is stored separately, and differs from the one set on held-out rows.
        assert not torch.isclose(sae.threshold, sae.set_thresholds[0], rtol=1e-3)
        for half, other in ((0, 1), (1, 0)):
            with exported.measuring_half(half):
                assert l0(halves[other]) == pytest.approx(4, rel=0.01)
        l0_of_run = trainer.report.values[label]["heldout_l0"]
        measured = []
        for half in HALVES:
            with exported.measuring_half(half):
                measured.append(l0(halves[half]) * len(halves[half]))
        assert l0_of_run == pytest.approx(sum(measured) / 401, rel=1e-4)


class Rows:
    """A source that returns the same two halves of held-out rows on every rank."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def batches(self, hook: int, batch_size: int, half: int) -> Iterator[tuple[Tensor, Tensor]]:
        for x in self._x[half::2].split(batch_size):
            yield x, x


@pytest.mark.parametrize("architecture", ["batch_topk", "matryoshka_batch_topk"])
def test_ranks_sharing_the_latents_set_the_same_thresholds_as_a_single_rank(
    architecture: str, make_job: Callable[..., JobConfig]
) -> None:
    job = make_job(sae={"architecture": architecture, "k": 4}, train={"precision": "fp32"})
    generator = torch.Generator().manual_seed(3)

    def whole_numbers(*shape: int) -> Tensor:
        return torch.randint(-9, 10, shape, generator=generator).float()

    # Sums of products of small integers are exact, regardless of the order of summation.
    rows, weights = whole_numbers(201, 16), whole_numbers(16, 64)

    def thresholds(parallel: Parallel) -> list[float]:
        learner = Learner(job, 16, None, parallel)
        learner.sae.W_enc.data.copy_(learner.latents.part(weights, 1))
        set_thresholds({"": learner}, Rows(rows), parallel, 50)
        return learner.sae.set_thresholds.tolist()

    cpu = torch.device("cpu")
    alone = thresholds(Parallel(cpu))
    assert min(alone) > 0
    assert on_all(2, lambda group: thresholds(Parallel(cpu, latents=group))) == [alone] * 2


def test_a_checkpoint_that_predates_set_thresholds_exports_its_learnt_threshold(
    make_job: Callable[..., JobConfig], make_trainer: MakeTrainer
) -> None:
    trainer = make_trainer(make_job(sae={"architecture": "batch_topk", "k": 4}))
    trainer.run()
    (learner,) = trainer.learners.values()
    tensors = dict(learner.state.tensors())
    assert float(tensors.pop("sae.set_thresholds")[0]) > 0
    learner.state.load({name: tensor.clone() for name, tensor in tensors.items()})
    assert torch.equal(learner.sae.cut, learner.sae.threshold)
    assert (learner.sae.set_thresholds < 0).all()

"""Tests that captured steps are bit-identical to eager steps, on a CPU that pretends to be a GPU.

`test_graph_replay.py` runs this file with TRITON_INTERPRET=1, because Triton kernels compute the update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.fake_gpu import job_of
from support.kernels import all_kernels, use_kernels
from support.tape import TapeOnCpu
from torch import Tensor

from trainer.activations.batches import Batch
from trainer.activations.outliers import LeftOut, Outliers
from trainer.contract.planning import latent_capacity
from trainer.parallel.base import Parallel
from trainer.runtime.device_queue import HostCopy
from trainer.runtime.triton_kernels import (
    DEAD_LATENTS,
    ENCODER_INPUTS,
    LATENT_SELECTIONS,
    METRIC_SUMS,
    SPARSE_PRODUCTS,
)
from trainer.saes.kernels import buffer_sizer, triton_dead_latents, triton_sparse
from trainer.self_test import learning
from trainer.self_test.base import Size
from trainer.training import graph_replay
from trainer.training.graph_replay import GraphReplay
from trainer.training.learner import Learner, StepState
from trainer.training.step import take_step

D_IN, N = 16, 24
ALONE = Parallel(torch.device("cpu"))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the GPU code path on a CPU, with Triton kernels for errors and updates, and torch for everything else."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    # With few tokens, the number of active latents varies widely between batches.
    monkeypatch.setattr(buffer_sizer, "MOST_GROWTH", math.inf)
    # Triton's interpreter is slow, so only one eager step runs before a step is captured.
    monkeypatch.setattr(graph_replay, "PLAIN_STEPS", 1)
    by_torch = SPARSE_PRODUCTS, LATENT_SELECTIONS, DEAD_LATENTS, ENCODER_INPUTS, METRIC_SUMS
    with use_kernels(all_kernels() | dict.fromkeys(by_torch)):
        yield


def rows(n: int, seed: int) -> Tensor:
    return torch.randn(n, D_IN, generator=torch.Generator().manual_seed(seed)) + 0.5


class Run:
    """Two learners for the same SAE; only one of them captures its steps."""

    def __init__(self, sae: dict[str, Any], train: dict[str, Any]) -> None:
        settings = {"batch_size": N, "precision": "bf16", "lr": 1e-2, "n_steps": 40} | train
        self.job = job_of({"architecture": "topk", "d_sae": 6, "k": 2, "dead_after_tokens": 10**6} | sae, settings)
        self.plain, self.captured = self._new(), self._new()
        self.number = 0

    def _new(self) -> Learner:
        learner = Learner(self.job, D_IN, None, ALONE)
        learner.initialise(rows(64, 99), rows(64, 99))
        return learner

    def record(self) -> GraphReplay:
        steps = GraphReplay(self.captured, TapeOnCpu)
        self.captured.whole_steps = steps
        return steps

    def take(self, n_steps: int, n_tokens: int = N, bad: int | None = None) -> None:
        for _ in range(n_steps):
            x = rows(n_tokens, self.number)
            if bad is not None:
                x[bad % n_tokens, 1] = torch.nan
            for one in (self.plain, self.captured):
                take_step([one], ALONE, self.number, [Batch([(x, x)], n_tokens)])
            self.number += 1

    def load_again(self) -> None:
        """Save and reload each learner's state."""
        for one in (self.plain, self.captured):
            one.state.load({name: tensor.clone() for name, tensor in one.state.tensors()})

    def assert_alike(self) -> None:
        found, expected = dict(self.captured.state.tensors()), dict(self.plain.state.tensors())
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
        for one in (self.plain, self.captured):
            assert one.sae._longest_since_fired >= int(one.sae.n_tokens_since_fired.max())
        assert self.captured.sae._longest_since_fired == self.plain.sae._longest_since_fired

    def intervals(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return both learners' metrics for the log interval that ends here."""
        of = []
        for one in (self.captured, self.plain):
            state = StepState.of(one.take_state())
            of.append(one.values(one.sums(), state))
        return of[0], of[1]


@pytest.mark.parametrize(
    ("architecture", "train"),
    [
        ("topk", {}),
        pytest.param("topk", {"state": "int8"}, marks=pytest.mark.slow),
        pytest.param("topk", {"precision": "fp16"}, marks=pytest.mark.slow),
        pytest.param("batch_topk", {}, marks=pytest.mark.slow),
        pytest.param("matryoshka_batch_topk", {"state": "bf16"}, marks=pytest.mark.slow),
        pytest.param("hierarchical_topk", {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_captured_steps_are_bit_identical_to_eager_ones(architecture: str, train: dict[str, Any]) -> None:
    run = Run({"architecture": architecture}, train)
    steps = run.record()
    # The learning rate rises and falls during these steps.
    run.take(4)
    found, expected = run.intervals()
    assert found == expected
    run.assert_alike()
    # AuxK becomes active, so a step is captured again.
    for one in (run.plain, run.captured):
        one.sae.b_enc.data[0], one.sae.n_tokens_since_fired[0] = -100.0, 10**7
        one.sae.note_since_fired(one.sae.n_tokens_since_fired)
    run.take(5)
    found, expected = run.intervals()
    assert found == expected
    assert found["auxk"] > 0
    run.assert_alike()
    assert steps.n_replayed == 3 + 3
    assert steps._n_captured == 2


@pytest.mark.slow
def test_captured_steps_are_bit_identical_if_kernels_sum_and_measure_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sparse, "LONGEST", 8)
    with use_kernels({SPARSE_PRODUCTS: triton_sparse, DEAD_LATENTS: triton_dead_latents}):
        run = Run({}, {})
        steps = run.record()
        for one in (run.plain, run.captured):
            one.sae.b_enc.data[0], one.sae.n_tokens_since_fired[0] = -100.0, 10**7
            one.sae.note_since_fired(one.sae.n_tokens_since_fired)
        run.take(3)
    run.assert_alike()
    assert steps.n_replayed == 2


def test_a_captured_step_with_a_nan_is_skipped() -> None:
    run = Run({}, {})
    steps = run.record()
    run.take(2)
    before = run.captured.sae.W_enc.detach().clone()
    run.take(1, bad=3)
    assert torch.equal(before, run.captured.sae.W_enc)
    run.take(1)
    found, expected = run.intervals()
    assert found == expected
    assert found["skipped_steps"] == 1
    run.assert_alike()
    assert steps.n_replayed == 3


@pytest.mark.slow
def test_a_batch_with_a_different_size_runs_eagerly_before_steps_are_captured_again() -> None:
    run = Run({}, {})
    steps = run.record()
    run.take(3)
    assert steps.n_replayed == 2
    run.take(1, n_tokens=7)
    run.take(2)
    assert steps.n_replayed == 2
    run.take(2)
    assert steps.n_replayed == 4
    run.assert_alike()


@pytest.mark.slow
def test_a_captured_step_replaces_and_counts_outliers_and_non_finite_rows() -> None:
    run, sample = Run({}, {}), rows(64, 99)
    found, expected = Outliers(sample, sample, 10.0), Outliers(sample, sample, 10.0)
    run.captured.whole_steps = steps = GraphReplay(run.captured, TapeOnCpu, found)
    for number in range(8):
        x = rows(N, number)
        x[number] *= 1000
        x[(number + 3) % N, 0] = torch.nan
        ordinary, _ = expected.replace(x, x)
        for outliers in (found, expected):
            outliers.note(N)
        take_step([run.captured], ALONE, number, [Batch([(x, x)], N)])
        take_step([run.plain], ALONE, number, [Batch([(ordinary, ordinary)], N)])
    assert steps.n_replayed
    run.assert_alike()
    assert torch.equal(found.counts, expected.counts)
    assert LeftOut.of(found.counts) == LeftOut(outliers=8, not_finite=8, zero=0, n_seen=8 * N)


def test_captured_steps_use_weights_that_were_resampled_after_the_capture() -> None:
    run = Run({}, {})
    steps = run.record()
    run.take(3)
    x = rows(64, 5)
    for one in (run.plain, run.captured):
        one.sae.n_tokens_since_fired[:3] = 10**7
        one.forget(one.resample(3, x, x))
    n = steps.n_replayed
    run.take(2)
    assert steps.n_replayed == n + 2 > 2
    run.assert_alike()


def test_a_run_continues_from_the_state_saved_by_captured_steps() -> None:
    run = Run({}, {})
    run.record()
    run.take(3)
    steps = run.record()
    run.load_again()
    run.take(3)
    # Load the state again, this time between two captured steps.
    n = steps.n_replayed
    run.load_again()
    run.take(1)
    assert steps.n_replayed == n > 0
    run.take(3)
    assert steps.n_replayed > n
    run.assert_alike()


@pytest.mark.slow
def test_no_step_is_captured_while_k_is_annealed() -> None:
    run = Run({"k_anneal_fraction": 0.25, "k_anneal_start": 6}, {"n_steps": 16})
    steps = run.record()
    run.take(5)
    assert not steps.n_replayed
    run.take(2)
    assert steps.n_replayed
    run.assert_alike()


@pytest.mark.parametrize(("n_failures", "most", "n_replayed"), [(2, 3, 1), (9, 2, 0)])
def test_a_failed_capture_is_reported_and_retried_only_a_few_times(
    n_failures: int, most: int, n_replayed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_replay, "RETRY_STEPS", 1)
    monkeypatch.setattr(graph_replay, "MOST_FAILURES", most)
    reported: list[str] = []

    class Broken(TapeOnCpu):
        def record(self, work: Any) -> None:
            if len(reported) < n_failures:
                raise RuntimeError("no graph here\nat x.cpp:9")
            super().record(work)

    run = Run({}, {})
    steps = GraphReplay(run.captured, Broken, report=reported.append)
    run.captured.whole_steps = steps
    run.take(4)
    assert all(words.endswith(": no graph here") for words in reported)
    assert ["no more attempts" in words for words in reported] == [False, most == 2]
    assert steps.n_replayed == n_replayed
    run.assert_alike()


# Tests with a penalty, where the host sizes the buffer for active latents based on the counts from earlier batches.


PENALISED = [
    {"architecture": "jumprelu", "penalty": "tanh"},
    *(pytest.param({"architecture": name}, marks=pytest.mark.slow) for name in ("jumprelu", "gated", "standard")),
]


class PlainSteps(GraphReplay):
    """A `GraphReplay` that makes its decisions as early as for captured steps, but runs every step eagerly."""

    def _may_record(self, decided: Any) -> bool:
        return False


class LateCopy(HostCopy):
    """A count that the GPU provides only at the end of the step; reading it earlier would stall the host."""

    def __init__(self, number: Tensor, queue: list[LateCopy]) -> None:
        super().__init__(number)
        queue.append(self)
        self._queue = queue

    def read(self) -> Tensor:
        # The last two copies belong to the current step, one for each learner.
        assert self not in self._queue[-2:]
        return super().read()


class Penalty(Run):
    """Two learners whose buffers, from the fourth step on, have space for `capacity` latents per token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sae: dict[str, Any], train: dict[str, Any]) -> None:
        # `told` collects the counts from earlier batches that the host has read.
        self.capacity, self.told = 6, list[float]()
        monkeypatch.setattr(buffer_sizer, "MEMORY", 2)
        monkeypatch.setattr(latent_capacity, "per_token", self._per_token)
        super().__init__({"d_sae": 8} | sae, train)
        self.steps = self.record()
        self.plain.whole_steps = PlainSteps(self.plain, TapeOnCpu)

    def _per_token(self, n_active: float, d_sae: int, *kept: int | None) -> int:
        if not kept:
            self.told.append(n_active)
        return self.capacity

    @property
    def capacities(self) -> list[int | None]:
        """The capacity per token at each learner's last step."""
        passes = (one.sae._buffer_sizer._pass for one in (self.plain, self.captured))
        return [one.capacity and one.capacity // one.n_tokens for one in passes]

    def assert_same_intervals(self, skipped: int = 0) -> None:
        states = [StepState.of(one.take_state()) for one in (self.plain, self.captured)]
        assert states[0] == states[1]
        assert (states[1].skipped, states[1].overflowed) == (skipped, skipped)
        plain, captured = (one.values(one.sums(), states[0]) for one in (self.plain, self.captured))
        assert captured == plain


@pytest.mark.parametrize("sae", PENALISED, ids=str)
def test_captured_steps_with_a_penalty_are_bit_identical_to_eager_ones(
    sae: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    queue: list[LateCopy] = []
    monkeypatch.setattr(buffer_sizer, "HostCopy", lambda number: LateCopy(number, queue))
    # The penalty is warmed up and adjusted during these steps.
    run = Penalty(monkeypatch, {"sparsity_warmup_fraction": 0.5} | sae, {})
    run.take(8)
    assert run.steps.n_replayed == 4
    assert run.capacities == [6, 6]
    # The count from each replay is read before the next replay overwrites it.
    assert run.told[::2] == run.told[1::2]
    assert len(set(run.told)) == 5
    run.assert_same_intervals()
    run.assert_alike()


@pytest.mark.slow
def test_steps_with_a_fixed_penalty_in_fp16_are_captured_unless_matmuls_are_dense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sae = {"architecture": "standard", "sparsity_coefficient": 0.02, "sparsity_warmup_fraction": 0.3}
    run = Penalty(monkeypatch, sae, {"precision": "fp16"})
    run.capacity = 0
    run.take(5)
    assert not run.steps.n_replayed
    run.capacity = 6
    run.take(4)
    assert run.steps.n_replayed == 3
    run.assert_same_intervals()
    run.assert_alike()


@pytest.mark.slow
def test_captured_steps_are_bit_identical_if_kernels_sum_the_penalty_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_sparse, "LONGEST", 2)
    with use_kernels({SPARSE_PRODUCTS: triton_sparse}):
        run = Penalty(monkeypatch, {"architecture": "gated"}, {})
        run.take(6, n_tokens=5)
    assert run.steps.n_replayed == 2
    run.assert_same_intervals()
    run.assert_alike()


@pytest.mark.slow
def test_a_step_is_captured_again_if_the_capacity_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Penalty(monkeypatch, {"architecture": "gated"}, {})
    run.take(6)
    assert run.steps.n_replayed == 2
    run.capacity = 7
    run.take(2)
    assert run.capacities == [7, 7]
    assert run.steps.n_replayed == 2
    run.take(2)
    assert run.steps.n_replayed == 4
    run.assert_same_intervals()
    run.assert_alike()


@pytest.mark.slow
def test_a_captured_step_that_overflows_is_skipped_and_dense_steps_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Penalty(monkeypatch, {"architecture": "standard"}, {})
    run.take(6)
    run.assert_same_intervals()
    before = {name: tensor.clone() for name, tensor in run.captured.state.tensors()}
    for one in (run.plain, run.captured):
        # With this bias, every latent is active.
        one.sae.b_enc.data.add_(100)
    run.take(1)
    for one in (run.plain, run.captured):
        one.sae.b_enc.data.copy_(before["sae.b_enc"])
    after = dict(run.captured.state.tensors())
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    # The host detects the overflow one batch later.
    run.take(1)
    assert run.steps.n_replayed == 4
    run.assert_same_intervals(skipped=1)
    assert not torch.equal(before["sae.W_enc"], run.captured.sae.W_enc)
    run.take(1)
    assert run.capacities == [None, None]
    run.take(4)
    assert run.capacities == [6, 6]
    assert run.steps.n_replayed == 5
    run.assert_same_intervals()
    run.assert_alike()


@pytest.mark.slow
def test_a_penalised_run_continues_from_the_state_saved_by_captured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Penalty(monkeypatch, {"architecture": "jumprelu"}, {})
    run.take(5)
    assert run.steps.n_replayed == 1
    run.load_again()
    x = rows(64, 5)
    with torch.no_grad():
        evaluated = []
        for one in (run.plain, run.captured):
            with one.evaluating():
                evaluated.append(one.forward(*one.normalised(x, x)).x_hat)
    assert torch.equal(*evaluated)
    # Loading a checkpoint replaces the moments' tensors.
    run.take(3)
    assert run.steps.n_replayed == 2
    run.assert_same_intervals()
    run.assert_alike()


@pytest.mark.slow
def test_the_self_test_detects_a_step_with_a_penalty_that_replays_an_old_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learning, "SMALL", Size(D_IN, 8, 2, N))

    def check() -> tuple[bool, dict[str, Any]]:
        run = Penalty(monkeypatch, {"architecture": "standard"}, {})
        return learning.captured_nearly_alike(run.plain, run.captured, ALONE.device, 6, TapeOnCpu)

    is_right, found = check()
    assert is_right
    assert found["replayed"] == 2
    monkeypatch.setattr(graph_replay._CapturedStep, "copy_in", lambda *_: None)
    is_right, found = check()
    assert not is_right
    assert found["changes_off"] > 2 * learning.NEAR_CHANGES


def test_a_host_wait_during_capture_raises_an_error() -> None:
    with pytest.raises(RuntimeError, match="waits"):
        TapeOnCpu().record(lambda: float(torch.ones(())))

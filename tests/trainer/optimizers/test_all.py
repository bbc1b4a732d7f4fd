"""Tests the requirements that every registered optimizer must meet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.steps import skips, take_alone
from torch import Tensor

from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.training.learner import Learner

MakeJob = Callable[..., JobConfig]
CHOICES: list[dict[str, Any]] = [
    {"optimizer": "adam"},
    {"optimizer": "adam", "state": "bf16"},
    {"optimizer": "adam", "state": "int8"},
    {"optimizer": "signum"},
    {"optimizer": "muon"},
]
each = pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(choice.values()))


def batch(seed: int) -> Tensor:
    """Return 128 tokens, each a weighted sum of a few of 40 directions."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(40, 16, generator=generator)
    generator.manual_seed(seed)
    return torch.rand(128, 40, generator=generator) * (torch.rand(128, 40, generator=generator) < 0.1) @ directions


def learner(job: JobConfig) -> Learner:
    made = Learner(job, 16, None, Parallel(torch.device("cpu")))
    made.initialise(batch(99), batch(99))
    return made


@pytest.fixture
def make(make_job: MakeJob) -> Callable[..., Learner]:
    def make(choice: dict[str, Any], **train: Any) -> Learner:
        return learner(make_job(train={"lr": "auto", "n_steps": 60, "precision": "fp32"} | choice | train))

    return make


def snapshot(one: Learner) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in one.state.tensors()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def heldout_fvu(one: Learner) -> float:
    x = torch.cat([batch(seed) for seed in range(1000, 1010)]) * one.sae.x_scale
    with torch.no_grad(), one.evaluating():
        error = (x - one.forward(x, x).x_hat).square().sum()
    return float(error / (x - x.mean(dim=0)).square().sum())


def test_there_is_a_case_for_every_optimizer() -> None:
    assert {choice["optimizer"] for choice in CHOICES} == set(catalog.OPTIMIZERS)


@each
def test_each_optimizer_learns_at_its_automatic_learning_rate(
    choice: dict[str, Any], make: Callable[..., Learner]
) -> None:
    one = make(choice)
    before = heldout_fvu(one)
    for step in range(60):
        take_alone(one, step, batch(step))
    assert heldout_fvu(one) < 0.7 * before
    assert skips(one) == (0, 0, 0)


@each
def test_a_resumed_run_is_bit_identical(choice: dict[str, Any], make: Callable[..., Learner], tmp_path: Path) -> None:
    whole, second = make(choice), make(choice)
    for step in range(10):
        take_alone(whole, step, batch(step))
    save_file({name: value.contiguous() for name, value in whole.state.tensors()}, tmp_path / "saved")
    second.state.load(load_file(tmp_path / "saved"))
    assert equal(snapshot(whole), snapshot(second))
    for step in range(10, 20):
        take_alone(whole, step, batch(step))
        take_alone(second, step, batch(step))
    assert equal(snapshot(whole), snapshot(second))


@each
def test_evaluation_changes_no_state(choice: dict[str, Any], make: Callable[..., Learner]) -> None:
    one = make(choice)
    heldout_fvu(one)  # before the first step
    for step in range(3):
        take_alone(one, step, batch(step))
    before = snapshot(one)
    heldout_fvu(one)
    assert equal(before, snapshot(one))
    with pytest.raises(ZeroDivisionError), one.evaluating():
        raise ZeroDivisionError
    assert equal(before, snapshot(one))


@each
def test_decoder_rows_have_unit_norm_in_evaluation(choice: dict[str, Any], make: Callable[..., Learner]) -> None:
    one = make(choice)
    for step in range(20):
        take_alone(one, step, batch(step))
    with one.evaluating():
        norms = one.sae.W_dec.norm(dim=1)
    torch.testing.assert_close(norms, torch.ones(64))


@each
def test_gradients_are_divided_by_the_loss_scale(choice: dict[str, Any], make: Callable[..., Learner]) -> None:
    plain, scaled = make(choice), make(choice)
    for step in range(5):
        for one in (plain, scaled):
            one.begin_step(step)
            one.accumulate(batch(step), batch(step))
        for parameter in scaled.sae.parameters():
            parameter.grad *= 1024  # exact, because 1024 is a power of 2
        plain.optimizer.step()
        scaled.optimizer.grad_scale = torch.tensor(1024.0)
        scaled.optimizer.step()
        for one in (plain, scaled):
            one.optimizer.zero_grad()
    assert equal(snapshot(plain), snapshot(scaled))


@each
def test_only_replaced_latents_lose_their_optimizer_state(choice: dict[str, Any], make: Callable[..., Learner]) -> None:
    one, replaced = make(choice), torch.arange(64) % 5 == 0
    for step in range(5):
        take_alone(one, step, batch(step))
    before = snapshot(one)
    with torch.no_grad():
        one.sae.W_dec[replaced] = one.sae.W_dec[replaced].roll(1, dims=0)
    one.forget(replaced)
    for name, parameter in one.sae.named_parameters():
        for kind, value in one.optimizer.state[parameter].items():
            old = before[f"optimizer.{kind}.{name}"]
            if name == "b_dec" or value.shape != parameter.shape:
                assert torch.equal(value, old)
                continue
            value, old, weight = (part.T if name == "W_dec" else part for part in (value, old, parameter))
            expected = weight[..., replaced] if kind == "z" else torch.zeros(())
            assert bool((value[..., replaced] == expected).all())
            assert torch.equal(value[..., ~replaced], old[..., ~replaced])
    with one.evaluating():
        torch.testing.assert_close(one.sae.W_dec.norm(dim=1), torch.ones(64))


@each
def test_the_automatic_learning_rate_falls_with_the_number_of_latents(choice: dict[str, Any]) -> None:
    auto_lr = catalog.OPTIMIZERS[choice["optimizer"]].settings().auto_lr
    assert auto_lr(512) >= auto_lr(3072) >= auto_lr(65_536) > 0

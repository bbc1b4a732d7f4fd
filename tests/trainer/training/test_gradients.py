"""Checks our pre-update gradient processing against torch's gradient clipping and loss scaling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.combinations import slow_unless
from support.steps import skips, take_alone
from torch import Tensor, nn

from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.training import gradients
from trainer.training.gradients import LARGEST_SCALE, LossScale, prepare, total_square
from trainer.training.learner import Learner

MakeJob = Callable[..., JobConfig]
CPU = torch.device("cpu")


def batch(seed: int, n_tokens: int = 128) -> Tensor:
    return torch.randn(n_tokens, 16, generator=torch.Generator().manual_seed(seed))


def learner(job: JobConfig) -> Learner:
    made = Learner(job, 16, None, Parallel(CPU))
    made.initialise(batch(99, 500), batch(99, 500))
    return made


def with_gradients(size: float) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((5, 7), (7, 5), (7,), (2,))]
    for parameter in parameters[:-1]:  # the last parameter has no gradient
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)
    return parameters


def norm_of(parameters: list[nn.Parameter]) -> Tensor:
    return nn.utils.get_total_norm([one.grad for one in parameters if one.grad is not None])


@pytest.mark.parametrize("size", [1e-8, 0.01, 1.0, 1e6])
@pytest.mark.parametrize("largest", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**15])
def test_gradients_divided_by_the_divisor_match_those_clipped_by_torch(
    size: float, largest: float, scale: float
) -> None:
    expected, parameters = with_gradients(size), with_gradients(size * scale)
    expected_norm = nn.utils.clip_grad_norm_(expected, largest or float("inf"))
    norm, divisor, bad = prepare(norm_of(parameters), torch.tensor(scale), largest)
    torch.testing.assert_close(norm, expected_norm)
    assert not bad
    for one, other in zip(expected[:-1], parameters[:-1], strict=True):
        torch.testing.assert_close(other.grad / (1 if divisor is None else divisor), one.grad)


def test_small_finite_gradients_do_not_change() -> None:
    parameters = with_gradients(0.01)
    before = [parameter.grad.clone() for parameter in parameters[:-1]]
    assert prepare(norm_of(parameters), torch.ones(()), 1.0)[1] is None
    assert all(torch.equal(one, parameter.grad) for one, parameter in zip(before, parameters, strict=False))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_single_non_finite_value_is_detected(value: float) -> None:
    parameters = with_gradients(0.01)
    parameters[2].grad[3] = value
    assert prepare(norm_of(parameters), torch.ones(()), 1.0)[2] == 1


def test_a_step_without_tokens_is_skipped() -> None:
    # Both the gradient and the number of tokens are 0.
    parameters = with_gradients(0.0)
    assert prepare(norm_of(parameters), torch.zeros(()), 1.0)[2] == 1


def bits(one: Learner) -> dict[str, Tensor]:
    """Return all tensors that a step changes, as bytes, so that NaNs and the sign of 0 are compared too."""
    tensors = dict(one.state.tensors()) | {"step_sums": one.sae.step_sums}
    return {name: tensor.detach().clone().flatten().view(torch.uint8) for name, tensor in tensors.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of the tensors that differ."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("state", ["fp32", "bf16", "int8"])
def test_a_batch_with_a_non_finite_value_is_counted_and_changes_nothing(
    state: str, value: float, make_job: MakeJob
) -> None:
    one = learner(make_job(train={"state": state}))
    for step in range(3):
        take_alone(one, step, batch(step))
    before, bad = bits(one), batch(3)
    bad[5, 7] = value
    take_alone(one, 3, bad)
    assert same(before, bits(one)) == []
    assert skips(one) == (1, 1, 0)
    take_alone(one, 4, bad)
    take_alone(one, 5, batch(5))
    assert skips(one) == (1, 0, 0)
    assert "sae.W_enc" in same(before, bits(one))


def injected(one: Learner, step: int, name: str, value: float) -> None:
    """Take a step with a finite batch but a non-finite gradient."""
    one.begin_step(step)
    one.accumulate(batch(step), batch(step))
    getattr(one.sae, name).grad[..., 1:2] = value
    one.update()


@pytest.mark.parametrize(
    ("value", "name", "optimizer"),
    slow_unless(
        lambda value, name, optimizer: name == "W_dec" or (optimizer == "adam" and value == float("inf")),
        itertools.product(
            (float("nan"), float("inf")), ("W_enc", "W_dec", "b_enc", "b_dec"), ("adam", "signum", "muon")
        ),
    ),
)
def test_a_skipped_step_leaves_no_trace(optimizer: str, name: str, value: float, make_job: MakeJob) -> None:
    job = make_job(train={"optimizer": optimizer})
    hit, spared = learner(job), learner(job)
    injected(hit, 0, name, value)  # before the optimizer has any state
    for step in range(1, 4):
        take_alone(hit, step, batch(step))
        take_alone(spared, step, batch(step))
        injected(hit, step, name, value)
    take_alone(hit, 9, batch(9))
    take_alone(spared, 9, batch(9))
    assert same(bits(hit), bits(spared)) == []
    assert skips(hit) == (4, 0, 0)


def fp16(make_job: MakeJob, **train: Any) -> Learner:
    return learner(make_job(train={"precision": "fp16", "n_steps": 60, **train}))


def test_the_loss_scale_matches_torch_grad_scaler() -> None:
    ours, theirs = LossScale(CPU, enabled=True), torch.amp.GradScaler("cpu", init_scale=2.0**15)
    ours._clean_steps.fill_(1990)
    theirs._lazy_init_scale_growth_tracker(CPU)
    theirs.scale(torch.ones(()))
    theirs._growth_tracker.fill_(1990)
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for step in range(40):
        weight.grad = torch.tensor(float("inf") if step in (3, 4, 20) else 1.0)
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update((~weight.grad.isfinite()).float())
        assert float(ours.factor) == theirs.get_scale()


def test_the_loss_scale_never_exceeds_its_maximum() -> None:
    scale = LossScale(CPU, enabled=True)
    for _ in range(30):
        scale._clean_steps.fill_(1999)
        scale.update(torch.zeros(()))
    assert float(scale.factor) == LARGEST_SCALE


def test_training_in_fp16_is_similar_to_training_in_fp32(make_job: MakeJob) -> None:
    narrow, wide = fp16(make_job), learner(make_job(train={"n_steps": 60, "precision": "fp32"}))
    for step in range(60):
        take_alone(narrow, step, batch(step))
        take_alone(wide, step, batch(step))
    errors = [one.values(one.sums())["fvu"] for one in (narrow, wide)]
    assert skips(narrow) == (0, 0, 0)
    assert errors[0] == pytest.approx(errors[1], rel=0.01)
    assert float(narrow.grad_norm) == pytest.approx(float(wide.grad_norm), rel=0.2)


def test_overflows_halve_the_scale_until_the_gradient_fits(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "LARGEST_SCALE", math.inf)
    one, first = fp16(make_job), 2.0**70  # with this scale, squared gradients overflow fp32
    one.loss_scale.factor.fill_(first)
    for step in range(60):
        take_alone(one, step, batch(step))
    skipped, in_a_row, _ = skips(one)
    assert 1 < skipped < 15
    assert in_a_row == 0
    assert float(one.loss_scale.factor) == first / 2**skipped
    assert one.values(one.sums())["fvu"] < 0.9


def test_the_loss_scale_changes_no_step_and_is_restored_on_resume(make_job: MakeJob) -> None:
    # A loss scale that is a power of 2 does not change the digits of fp32 gradients, but it would change fp16 matmuls.
    scaled, plain = fp16(make_job), learner(make_job(train={"precision": "fp32", "n_steps": 60}))
    scaled.precision = "fp32"
    for step in range(10):
        take_alone(scaled, step, batch(step))
        take_alone(plain, step, batch(step))
    resumed = fp16(make_job)
    resumed.state.load({name: tensor.clone() for name, tensor in scaled.state.tensors()})
    assert same(bits(resumed), bits(scaled)) == []
    assert int(resumed.loss_scale.state()["clean_steps"]) == 10
    assert float(scaled.grad_norm) == float(plain.grad_norm)
    different = same({name: value for name, value in bits(scaled).items() if name in bits(plain)}, bits(plain))
    assert different == []


@pytest.mark.parametrize("shape", [(65_536,), (384, 20_000), (20_000, 384)])
def test_the_norm_of_a_large_gradient_matches_float64(shape: tuple[int, ...]) -> None:
    gradients = [torch.randn(shape), torch.randn(7)]
    if len(shape) == 2:
        # This tensor has the memory layout of the encoder's gradient, where each latent is contiguous.
        gradients.append(torch.randn(shape).T)
    expected = sum(float(gradient.double().square().sum()) for gradient in gradients)
    assert float(total_square(gradients)) == pytest.approx(expected, rel=1e-6)


def test_the_norm_is_0_if_there_are_no_gradients() -> None:
    assert float(total_square([])) == 0


def test_the_squared_norm_is_on_the_given_device_even_if_there_are_no_gradients() -> None:
    assert total_square([], torch.device("meta")).device.type == "meta"

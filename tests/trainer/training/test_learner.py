from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.steps import ALONE, take_alone
from torch import Tensor

from trainer.activations.batches import Batch
from trainer.contract.settings.catalog import ARCHITECTURES, OPTIMIZERS
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.training.learner import Learner
from trainer.training.step import take_step

MakeJob = Callable[..., JobConfig]


def batch(n_tokens: int = 128, seed: int = 1) -> Tensor:
    return torch.randn(n_tokens, 16, generator=torch.Generator().manual_seed(seed))


def learner(job: JobConfig) -> Learner:
    made = Learner(job, 16, None, Parallel(torch.device("cpu")))
    made.initialise(batch(500, seed=9), batch(500, seed=9))
    return made


@pytest.mark.parametrize("sizes", [(128,), (100, 28), (1, 2, 125), (60, 20), (200, 100)])
def test_micro_batches_of_any_size_yield_the_mean_gradient_over_all_tokens(
    sizes: tuple[int, ...], make_job: MakeJob
) -> None:
    # A step is configured for 128 tokens, but its learning rate does not depend on the number of tokens it actually
    # gets.
    job = make_job(train={"grad_clip": 0.0, "lr": 1e-3})
    parts, whole = learner(job), learner(make_job(train={"grad_clip": 0.0, "lr": 1e-3, "batch_size": sum(sizes)}))
    x = batch(sum(sizes))
    take_step([parts], ALONE, 0, [Batch([(part, part)], len(part)) for part in x.split(list(sizes))])
    take_alone(whole, 0, x)
    assert float(parts.grad_norm) == pytest.approx(float(whole.grad_norm), rel=1e-5)
    for name, tensor in whole.sae.state_dict().items():
        torch.testing.assert_close(parts.sae.state_dict()[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("scaling", "factor"), [("off", 1.0), ("sqrt", 2.0), ("linear", 4.0)])
@pytest.mark.parametrize("lr", [1e-3, "auto"])
def test_the_learning_rate_scales_with_the_tokens_per_step_as_configured(
    scaling: str, factor: float, lr: float | str, make_job: MakeJob
) -> None:
    train = {"lr": lr, "batch_size": 64, "accumulate": 4, "decay_fraction": 0.0}
    usual, scaled = (
        Learner(make_job(train=train | more), 16, None, Parallel(torch.device("cpu")))
        for more in ({"lr_scaling": "off"}, {"lr_scaling": scaling, "lr_tokens": 64})
    )
    for one in (usual, scaled):
        one.begin_step(0)
    assert scaled.optimizer.param_groups[0]["lr"] == pytest.approx(factor * usual.optimizer.param_groups[0]["lr"])


def test_the_data_scale_does_not_change_the_learnt_directions(make_job: MakeJob) -> None:
    job, x = make_job(train={"n_steps": 5}), batch()
    small, large = learner(job), Learner(job, 16, None, Parallel(torch.device("cpu")))
    large.initialise(1000 * batch(500, seed=9), 1000 * batch(500, seed=9))
    for step in range(5):
        take_alone(small, step, x)
        take_alone(large, step, 1000 * x)
    assert float(small.sae.x_scale / large.sae.x_scale) == pytest.approx(1000, rel=1e-5)
    torch.testing.assert_close(small.sae.W_dec, large.sae.W_dec, rtol=1e-3, atol=1e-4)


def test_the_error_for_a_checkpoint_with_a_different_sae_states_the_reason(make_job: MakeJob) -> None:
    from trainer.contract.errors import UserError

    tensors = dict(learner(make_job(sae={"d_sae": 32})).state.tensors())
    with pytest.raises(UserError, match=r"does not fit this job's SAE: .*size mismatch for \w+"):
        learner(make_job(sae={"d_sae": 64})).state.load(tensors)


@pytest.mark.parametrize("architecture", [name for name, entry in ARCHITECTURES.items() if entry.transcodes != "no"])
def test_a_transcoder_learns_from_inputs_whose_mean_is_far_from_0(architecture: str, make_job: MakeJob) -> None:
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(40, 16, generator=generator)
    fvu, used = [], torch.rand(4000, 40, generator=generator)
    y = (used * (used > 0.9)) @ directions
    for far in (0.0, 20.0):
        x = y @ torch.randn(16, 16, generator=torch.Generator().manual_seed(1)) + far
        job = make_job(sae={"architecture": architecture}, train={"batch_size": 200, "n_steps": 60, "lr": "auto"})
        learner = Learner(job, 16, 16, Parallel(torch.device("cpu")))
        learner.initialise(x, y)
        for step in range(60):
            rows = slice(200 * (step % 20), 200 * (step % 20) + 200)
            take_alone(learner, step, x[rows], y[rows])
        fvu.append(learner.values(learner.sums())["fvu"])
    assert fvu[1] == pytest.approx(fvu[0], rel=0.05)
    assert fvu[0] < 0.8


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_latents_and_dimensions_are_not_confused_if_d_sae_equals_d_in(optimizer: str, make_job: MakeJob) -> None:
    job = make_job(sae={"d_sae": 16}, train={"optimizer": optimizer, "batch_size": 100})
    learner, x = Learner(job, 16, None, Parallel(torch.device("cpu"))), torch.randn(500, 16)
    learner.initialise(x, x)
    for step in range(3):
        take_alone(learner, step, x[100 * step : 100 * step + 100])
    before = {name: tensor.clone() for name, tensor in learner.state.tensors()}
    learner.forget(torch.arange(16) == 3)
    changed = {name: tensor != before[name] for name, tensor in learner.state.tensors() if tensor.shape == (16, 16)}
    assert {name.split(".")[-1] for name, where in changed.items() if where.any()} <= {"W_enc", "W_dec"}
    for name, where in changed.items():
        own = where if name.endswith("W_dec") else where.T
        assert not own[torch.arange(16) != 3].any(), name
    moments = [where for name, where in changed.items() if name.startswith("optimizer.")]
    # Signum copies the current weights to its state z, which must not modify the weights.
    assert optimizer == "signum" or any(where.any() for where in moments)

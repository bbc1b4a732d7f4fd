from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainer.contract.job import JobConfig
from trainer.learner import Learner

MakeJob = Callable[..., JobConfig]


def batch(n_tokens: int = 128, seed: int = 1) -> Tensor:
    return torch.randn(n_tokens, 16, generator=torch.Generator().manual_seed(seed))


def learner(job: JobConfig) -> Learner:
    made = Learner(job, 16, None, torch.device("cpu"))
    made.initialise(batch(500, seed=9), batch(500, seed=9))
    return made


@pytest.mark.parametrize("sizes", [(128,), (100, 28), (1, 2, 125), (60, 20), (200, 100)])
def test_micro_batches_of_any_sizes_give_the_gradient_of_the_mean_over_all_their_tokens(
    sizes: tuple[int, ...], make_job: MakeJob
) -> None:
    # 128 tokens are expected; fewer or more are no smaller or larger step.
    job = make_job(train={"grad_clip": 0.0, "lr": 1e-3})
    parts, whole = learner(job), learner(make_job(train={"grad_clip": 0.0, "lr": 1e-3, "batch_size": sum(sizes)}))
    x = batch(sum(sizes))
    parts.begin_step(0)
    for part in x.split(list(sizes)):
        parts.accumulate(part, part)
    parts.update()
    whole.step(0, x)
    assert float(parts.grad_norm) == pytest.approx(float(whole.grad_norm), rel=1e-5)
    for name, tensor in whole.sae.state_dict().items():
        torch.testing.assert_close(parts.sae.state_dict()[name], tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_the_scale_of_the_data_changes_nothing_but_the_units(make_job: MakeJob) -> None:
    job, x = make_job(train={"n_steps": 5}), batch()
    small, large = learner(job), Learner(job, 16, None, torch.device("cpu"))
    large.initialise(1000 * batch(500, seed=9), 1000 * batch(500, seed=9))
    for step in range(5):
        small.step(step, x)
        large.step(step, 1000 * x)
    assert float(small.sae.x_scale / large.sae.x_scale) == pytest.approx(1000, rel=1e-5)
    torch.testing.assert_close(small.sae.W_dec, large.sae.W_dec, rtol=1e-3, atol=1e-4)


def test_a_checkpoint_of_another_sae_is_refused_with_the_reason(make_job: MakeJob) -> None:
    from trainer.contract.problems import UserError

    tensors = dict(learner(make_job(sae={"d_sae": 32})).tensors())
    with pytest.raises(UserError, match=r"does not fit this job's SAE: .*size mismatch for \w+"):
        learner(make_job(sae={"d_sae": 64})).load(tensors)

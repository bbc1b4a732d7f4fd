from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from support.steps import ALONE, take_alone

from trainer.activations.batches import Batch
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.training.learner import Learner
from trainer.training.step import cut_of, take_step

MakeJob = Callable[..., JobConfig]


def new(job: JobConfig) -> Learner:
    learner, x = Learner(job, 16, None, ALONE), torch.randn(500, 16, generator=torch.Generator().manual_seed(9))
    learner.initialise(x, x)
    return learner


def test_saes_that_share_batches_learn_the_same_as_if_each_was_trained_alone(make_job: MakeJob) -> None:
    jobs = [make_job(sae={"k": k}) for k in (2, 4)]
    together, alone = [new(job) for job in jobs], [new(job) for job in jobs]
    x = torch.randn(128, 16)
    take_step(together, ALONE, 0, iter([Batch([(x, x)], 128)]))
    for one, other in zip(together, alone, strict=True):
        take_alone(other, 0, x)
        assert all(map(torch.equal, one.sae.state_dict().values(), other.sae.state_dict().values()))


def test_a_request_made_while_batches_are_being_read_is_handled_at_the_same_step(make_job: MakeJob) -> None:
    requested: list[bool] = []

    def batches() -> Iterator[Batch]:
        x = torch.randn(64, 16)
        yield Batch([(x, x)], 64)
        yield Batch([(x, x)], 64)
        requested.append(True)

    learner = new(make_job())
    assert take_step([learner], ALONE, 0, batches(), lambda: (bool(requested), False)) == (True, False)
    assert take_step([learner], ALONE, 1, batches()) == (False,)


def test_a_steps_micro_batches_are_no_larger_than_memory_allows(make_job: MakeJob) -> None:
    job = make_job(train={"batch_size": 96, "accumulate": 2})
    parallel = Parallel(torch.device("cpu"))
    assert [token_slice.length for token_slice in cut_of(Layout(job, 1), parallel).token_slices] == [96, 96]
    parallel.most_tokens = 50
    assert [token_slice.length for token_slice in cut_of(Layout(job, 1), parallel).token_slices] == [48] * 4

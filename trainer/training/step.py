"""One training step: it processes micro-batches, exchanges gradients and updates weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from trainer.activations.batches import Batch
from trainer.activations.micro_batches import Cut, cut_within
from trainer.contract.planning.workload import Layout
from trainer.parallel.base import Parallel
from trainer.runtime.phases import EXCHANGE, UPDATE, phase
from trainer.training.layers import trained_together
from trainer.training.learner import Learner

Requests = tuple[bool, ...]


def no_requests() -> Requests:
    """Return no requests, for callers that never stop or save."""
    return (False,)


def take_step(
    learners: Collection[Learner],
    parallel: Parallel,
    number: int,
    batches: Iterable[Batch],
    requests: Callable[[], Requests] = no_requests,
) -> Requests:
    """Take step `number`, counted from 0, for all SAEs on this rank, each on the raw data from its hook.

    All ranks must call this function together. `requests` is called before the exchange and returns this rank's
    requests. The result says, for each request, whether any rank made it.
    """
    for learner in learners:
        learner.begin_step(number)
    if learners and all(learner.whole_steps for learner in learners):
        ((hooks, of_all),) = batches
        for learner in learners:
            assert learner.whole_steps is not None
            learner.whole_steps.take(*hooks[learner.hook], of_all)
        return requests()
    n_passed = 0
    for hooks, of_all in batches:
        n_passed += of_all
        for unit in trained_together(learners):
            unit.accumulate(*hooks[unit.hook], of_all, is_last=n_passed == unit.tokens_per_step)
    with phase(EXCHANGE):
        agreed = parallel.sum_step_((learner.tensors_to_exchange() for learner in learners), requests())
    with phase(UPDATE):
        for unit in trained_together(learners):
            unit.update()
    return agreed


def cut_of(layout: Layout, parallel: Parallel) -> Cut:
    """Return how a step is divided into micro-batches, with this rank's slice of each micro-batch."""
    return cut_within(
        layout.tokens_per_step,
        layout.micro_batches,
        parallel.shares.tokens,
        parallel.data.index,
        parallel.most_tokens,
    )

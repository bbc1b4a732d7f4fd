"""Dry runs of a pass on one rank, whose peer never arrives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer.contract.planning import first_look
from trainer.contract.planning.first_look import Costs
from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.dry_run import dry_run
from trainer.parallel.group import Group, PeerLost, local_shard
from trainer.parallel.threads import Meeting, Threads
from trainer.training.learner import Learner


def learner_of(job: JobConfig, **groups: Group) -> tuple[Learner, torch.Tensor]:
    """Return a learner initialised from random data without exchanges between ranks, and the data."""
    learner = Learner(job, 16, None, Parallel(torch.device("cpu"), **groups))
    x = torch.randn(256, 16, generator=torch.Generator().manual_seed(0))
    with dry_run(learner.sae):
        learner.initialise(x, x)
    return learner, x


def absent_peer() -> Group:
    return Threads(Meeting(2, timeout_s=0.1), 2, 0)


def groups_of(mode: str) -> dict[str, Group]:
    peer = absent_peer()
    return {"world": peer, {"ddp": "data", "tensor": "latents"}[mode]: peer}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("mode", ["ddp", "tensor"])
def test_a_dry_run_waits_for_no_rank_and_leaves_the_state_unchanged(
    mode: str, architecture: str, make_job: Callable[..., JobConfig]
) -> None:
    learner, x = learner_of(make_job(sae={"architecture": architecture}), **groups_of(mode))
    before = {name: tensor.clone() for name, tensor in learner.state.tensors()}
    with dry_run(learner.sae):
        learner.accumulate(x, x, 2 * len(x))
    assert any(parameter.grad is not None for parameter in learner.sae.parameters())
    learner.forget_pass()
    after = dict(learner.state.tensors())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not learner.sae.step_sums.any()


@pytest.mark.parametrize(("mode", "architecture"), [("tensor", "topk"), ("ddp", "batch_topk")])
def test_after_a_dry_run_a_pass_exchanges_with_all_ranks_again(
    mode: str, architecture: str, make_job: Callable[..., JobConfig]
) -> None:
    learner, x = learner_of(make_job(sae={"architecture": architecture}), **groups_of(mode))
    with pytest.raises(MemoryError), dry_run(learner.sae):
        raise MemoryError
    with pytest.raises(PeerLost):
        learner.accumulate(x, x, 2 * len(x))


@pytest.mark.parametrize("mode", ["single", "ddp", "tensor"])
def test_a_dry_run_includes_auxk_before_any_latent_is_dead(mode: str, make_job: Callable[..., JobConfig]) -> None:
    learner, x = learner_of(make_job(sae={"architecture": "topk"}), **({} if mode == "single" else groups_of(mode)))
    target = local_shard(x, learner.latents.group)
    with dry_run(learner.sae):
        assert learner.forward(x, target).losses["auxk"] > 0
    if mode != "tensor":
        assert learner.forward(x, target).losses["auxk"] == 0


@pytest.mark.parametrize("costs", [Costs(0.2, 10), None])
def test_a_dry_run_has_the_most_active_entries_that_a_rank_can_hold(
    costs: Costs | None, make_job: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_look, "costs", lambda: costs)
    job = make_job(sae={"architecture": "topk"})
    learner, x = learner_of(job, **groups_of("tensor"))
    alone, _ = learner_of(job)
    shares = []
    for one in (learner, alone):
        with dry_run(one.sae):
            shares.append(int((one.forward(x, local_shard(x, one.latents.group)).acts.values > 0).sum()))
    assert shares[0] > 0.9 * shares[1]

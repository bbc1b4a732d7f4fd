"""Tests that all ranks make the same exchanges in the same order, on both the CPU and the GPU code path.

The GPU path runs on CPU tensors that pretend to be on a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from support.fake_gpu import job_of
from support.kernels import NO_KERNELS, use_kernels
from support.recorded_ranks import Trained, grids, in_step, trained
from torch import Tensor

from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.saes.kernels import dead_latents

# No latent is dead at the first step, but some are at the second.
N_STEPS = 2
N_TOKENS = 26
CHOOSING = ("topk", "hierarchical_topk", "batch_topk", "matryoshka_batch_topk")
# The CPU path, where exchanges may depend on values, is tested with fewer ranks than the GPU path.
SIZES = {"cpu": (2, 4), "gpu": (2, 4, 8)}


def job(architecture: str, n_ranks: int, sharing: int) -> JobConfig:
    mode = "ddp" if sharing == 1 else "tensor" if sharing == n_ranks else "hybrid"
    sae = {"architecture": architecture, "d_sae": 48, "k": 3, "dead_after_tokens": 20}
    train = {"batch_size": N_TOKENS, "global_batch_size": N_TOKENS, "precision": "fp32", "lr": 3e-3}
    return job_of(sae, train, {"mode": mode} | ({"latent_ranks": sharing} if mode == "hybrid" else {}))


@pytest.fixture
def data() -> Tensor:
    return torch.randn(N_TOKENS, 12, generator=torch.Generator().manual_seed(0)) + torch.arange(12)


@pytest.fixture(params=["cpu", "gpu"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(torch.Tensor, "is_cuda", request.param == "gpu")
    with use_kernels(NO_KERNELS):
        yield request.param


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_ranks_make_the_same_exchanges_and_learn_the_same_as_a_single_rank(
    architecture: str, path: str, data: Tensor
) -> None:
    (alone,) = trained(job(architecture, 1, 1), data, 1, 1, N_STEPS)
    # Eight ranks take two thirds of the time, and only their number of groups differs from four ranks.
    sizes = SIZES[path] if architecture in ("batch_topk", "jumprelu") else (2, 4)
    for n_ranks, sharing in grids(sizes):
        ranks = trained(job(architecture, n_ranks, sharing), data, n_ranks, sharing, N_STEPS)
        for one, other in itertools.combinations(ranks, 2):
            assert in_step(one.calls, other.calls), f"{n_ranks} ranks, {sharing} share the latents"
        # In the other architectures, one pre-activation is so close to the bound that rounding decides whether it is
        # active.
        if architecture in CHOOSING:
            same_weights(ranks, alone)


@pytest.mark.parametrize("path", ["gpu"], indirect=True)
def test_auxk_candidates_found_by_kernels_on_each_rank_match_those_on_one_rank(
    path: str, data: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let each rank find the AuxK candidates among its own latents, and order them by id, as the kernel does."""
    (alone,) = trained(job("topk", 1, 1), data, 1, 1, N_STEPS)
    n_found = []

    def longest_since_fired(
        since_fired: Tensor, b_enc: Tensor, variance: Tensor, dead_after: int, n: int, dtype: torch.dtype
    ) -> dead_latents.DeadLatents:
        of_dead = torch.where(since_fired >= dead_after, since_fired, -1)
        latents = of_dead.sort(stable=True, descending=True).indices[:n].sort().values
        is_dead = of_dead[latents] >= 0
        n_found.append(int(is_dead.sum()))
        bias = torch.where(is_dead, b_enc.detach()[latents].to(dtype), -torch.inf)
        return dead_latents.DeadLatents(latents, bias, is_dead.any() / variance)

    monkeypatch.setattr(dead_latents, "longest_since_fired", longest_since_fired)
    for n_ranks, sharing in grids(SIZES[path]):
        same_weights(trained(job("topk", n_ranks, sharing), data, n_ranks, sharing, N_STEPS), alone)
    assert max(n_found) > 3


def same_weights(ranks: list[Trained], alone: Trained) -> None:
    for rank in ranks:
        sae, dims = rank.learner.sae, rank.learner.sae.latent_dims()
        for name, whole in alone.learner.sae.state_dict().items():
            expected = rank.learner.latents.part(whole, dims[name]) if name in dims else whole
            torch.testing.assert_close(sae.state_dict()[name], expected, rtol=2e-4, atol=2e-5)

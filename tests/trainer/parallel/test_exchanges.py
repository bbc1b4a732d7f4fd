"""All ranks ask for the same exchanges in the same order, on the path of a CPU and on that of a GPU.

That of a GPU runs here on tensors of a CPU which say that they are on a GPU.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from support.fake_gpu import job_of
from support.recorded_ranks import Trained, grids, in_step, trained
from torch import Tensor

from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.contract.settings.job import JobConfig
from trainer.saes.kernels import sparse

# The first with no latent dead, the second with some.
N_STEPS = 2
N_TOKENS = 26
CHOOSING = ("topk", "batch_topk", "matryoshka_batch_topk")
# A GPU's path asks for the same whatever the numbers are; a CPU's is tried on fewer ranks.
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
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "gpu":
        monkeypatch.setattr(torch.Tensor, "is_cuda", True)
        monkeypatch.setattr(sparse, "triton_for", lambda rows, dtype=None: None)
    return str(request.param)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_all_ranks_exchange_the_same_and_learn_what_one_does(architecture: str, path: str, data: Tensor) -> None:
    (alone,) = trained(job(architecture, 1, 1), data, 1, 1, N_STEPS)
    for n_ranks, sharing in grids(SIZES[path]):
        ranks = trained(job(architecture, n_ranks, sharing), data, n_ranks, sharing, N_STEPS)
        for one, other in itertools.combinations(ranks, 2):
            assert in_step(one.calls, other.calls), f"{n_ranks} ranks, {sharing} share the latents"
        # Of the others a pre-activation lies at the bound for certain, on either side of it by rounding.
        if architecture in CHOOSING:
            same_weights(ranks, alone)


def same_weights(ranks: list[Trained], alone: Trained) -> None:
    for rank in ranks:
        sae, dims = rank.learner.sae, rank.learner.sae.latent_dims()
        for name, whole in alone.learner.sae.state_dict().items():
            expected = rank.learner.latents.part(whole, dims[name]) if name in dims else whole
            torch.testing.assert_close(sae.state_dict()[name], expected, rtol=2e-4, atol=2e-5)

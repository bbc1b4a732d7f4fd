"""Tests that ranks sharing the latents compute the same AuxK gradients as a single rank. See also `test_topk.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.fake_gpu import job_of
from support.kernels import NO_KERNELS, use_kernels
from support.recorded_ranks import Trained, grids, on_grid
from torch import Tensor

from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.parallel.group import local_shard
from trainer.parallel.latents import shard_latents
from trainer.training.learner import Learner

D_IN, D_SAE = 12, 48
# At most 12 latents are AuxK candidates, and 6 of them are active on each token.
DEAD_AFTER = 1000
GRIDS = [(n_ranks, sharing) for n_ranks, sharing in grids((2, 4, 8)) if sharing > 1]


def job(n_ranks: int, sharing: int, precision: str = "fp32") -> JobConfig:
    mode = "single" if n_ranks == 1 else "tensor" if sharing == n_ranks else "hybrid"
    sae = {"architecture": "topk", "d_sae": D_SAE, "k": 3, "dead_after_tokens": DEAD_AFTER}
    train = {"batch_size": 26, "global_batch_size": 26, "precision": precision}
    return job_of(sae, train, {"mode": mode} | ({"latent_ranks": sharing} if mode == "hybrid" else {}))


def rows(n: int = 26) -> Tensor:
    return torch.randn(n, D_IN, generator=torch.Generator().manual_seed(0)) + torch.arange(D_IN)


def silences(case: str, sharing: int) -> Tensor:
    """Return the number of tokens since each latent last fired, for one of the cases."""
    silent = torch.arange(D_SAE) % 7
    if case == "few are dead":
        silent[[3, 4, 40]] = DEAD_AFTER
    elif case == "many are dead":
        silent[5:40] += DEAD_AFTER
    elif case == "all are dead":
        silent += DEAD_AFTER + 2**33
    elif case == "the last rank holds all candidates":
        of_ranks = shard_latents(D_SAE, [1.0] * sharing)
        silent[of_ranks[0]] = DEAD_AFTER
        silent[of_ranks[-1]] = DEAD_AFTER + 50
    return silent


def gradients(
    n_ranks: int, sharing: int, silent: Tensor, n_tokens: int = 26, precision: str = "fp32"
) -> dict[str, Tensor]:
    """Return the gradients for all latents after one pass, summed over the tokens on all ranks."""
    x = rows()

    def work(learner: Learner, parallel: Parallel) -> None:
        learner.sae.n_tokens_since_fired.copy_(silent[learner.sae.ids])
        learner.sae._longest_since_fired = 2**40
        own = local_shard(x[:n_tokens], parallel.data)
        learner.accumulate(own, own, n_tokens)

    ranks = on_grid(job(n_ranks, sharing, precision), x, n_ranks, sharing, work)
    return {name: whole(name, ranks) for name in ("W_enc", "b_enc", "W_dec", "b_dec")}


def whole(name: str, ranks: list[Trained]) -> Tensor:
    """Return a parameter's gradient summed over ranks, with each latent at its global index."""
    saes = [rank.learner.sae for rank in ranks]
    total = torch.zeros({"W_enc": (D_IN, D_SAE), "b_enc": (D_SAE,), "W_dec": (D_SAE, D_IN), "b_dec": (D_IN,)}[name])
    for sae in saes:
        dim = sae.latent_dims().get(name)
        part = sae.get_parameter(name).grad
        total = total + part if dim is None else total.index_add(dim, sae.ids, part)
    return total


@pytest.fixture(params=["cpu", "gpu"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(torch.Tensor, "is_cuda", request.param == "gpu")
    with use_kernels(NO_KERNELS):
        yield request.param


CASES = ("none is dead", "few are dead", "many are dead", "all are dead", "the last rank holds all candidates")


@pytest.mark.parametrize("case", CASES)
def test_ranks_sharing_latents_get_the_same_gradients_as_one_rank(case: str, path: str) -> None:
    for n_ranks, sharing in GRIDS:
        silent = silences(case, sharing)
        assert_alike(gradients(n_ranks, sharing, silent), gradients(1, 1, silent), f"{n_ranks} ranks, {sharing} share")


def test_a_rank_without_tokens_takes_part_in_exchanges(path: str) -> None:
    silent = silences("many are dead", 4)
    assert_alike(gradients(4, 4, silent, n_tokens=3), gradients(1, 1, silent, n_tokens=3), "")


def test_weights_exchanged_in_16_bits_lead_to_nearly_the_same_gradients_as_one_rank(path: str) -> None:
    silent = silences("many are dead", 4)
    found, expected = (gradients(n, n, silent, precision="bf16") for n in (4, 1))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() < 0.02 * gradient.norm(), name


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor], words: str) -> None:
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=f"{name}: {words}")

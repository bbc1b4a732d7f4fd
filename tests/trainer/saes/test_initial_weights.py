from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.saes import new_sae
from torch import Tensor

from trainer.contract.errors import UserError
from trainer.contract.settings.job import JobConfig
from trainer.parallel.latents import Latents
from trainer.parallel.threads import Threads, on_all
from trainer.saes import initial_weights
from trainer.saes.batch_topk import BatchTopK
from trainer.saes.initial_weights import geometric_median, initialise, unit_scale
from trainer.saes.topk import TopK

MakeJob = Callable[..., JobConfig]


def new_topk() -> TopK:
    return new_sae(TopK, 6, 20, k=2)


def sample(n: int = 500, d: int = 6, seed: int = 0) -> Tensor:
    """Draw rows with a mean far from 0 and a different spread in each dimension."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed)) * torch.arange(1.0, d + 1) + 40


def test_a_few_tokens_with_huge_norms_do_not_move_the_geometric_median() -> None:
    points = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)) + 5
    points[:20] *= 1000
    assert (points.mean(dim=0) - 5).abs().max() > 10
    assert (geometric_median(points) - 5).abs().max() < 0.2


def test_the_geometric_median_of_equal_points_is_that_point() -> None:
    assert geometric_median(torch.full((9, 3), 2.5)).tolist() == [2.5] * 3


def test_the_unit_scale_makes_the_mean_distance_to_the_mean_equal_sqrt_d_in() -> None:
    x = sample()
    scaled = x * unit_scale(x)
    assert (scaled - scaled.mean(dim=0)).norm(dim=1).mean().item() == pytest.approx(6**0.5, rel=1e-5)
    torch.testing.assert_close(unit_scale(x + 1000), unit_scale(x), rtol=1e-3, atol=0)
    torch.testing.assert_close(unit_scale(8 * x), unit_scale(x) / 8)


@pytest.mark.parametrize(("n_latents", "d"), [(100, 7), (97, 16), (33, 1), (5, 2)])
@pytest.mark.parametrize("at_once", [1, 320])
def test_two_ranks_drawing_rows_in_blocks_get_the_same_rows_as_one_rank(
    n_latents: int, d: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial_weights, "_AT_ONCE", at_once)
    whole = torch.nn.functional.normalize(torch.randn(n_latents, d, generator=torch.Generator().manual_seed(4)), dim=1)

    def of_rank(group: Threads) -> tuple[Tensor, Tensor]:
        latents = Latents(n_latents, group, [1.0, 2.0])
        own = torch.empty(len(latents.own), d)
        initial_weights._draw_unit_rows(own, latents, torch.Generator().manual_seed(4))
        return latents.own, own

    for ids, own in on_all(2, of_rank):
        assert torch.equal(own, whole[ids])
    alone = torch.empty(n_latents, d)
    initial_weights._draw_unit_rows(alone, Latents(n_latents), torch.Generator().manual_seed(4))
    assert torch.equal(alone, whole)


@pytest.mark.parametrize("how", ["geometric_median", "mean", "zeros"])
@pytest.mark.parametrize("normalize", ["mean_norm", "none"])
def test_b_dec_and_the_mean_and_variance_are_computed_from_normalised_data(
    how: str, normalize: str, make_job: MakeJob
) -> None:
    x, sae = sample(), new_topk()
    initialise(sae, x, x, make_job(sae={"b_dec_init": how, "normalize": normalize}).sae, seed=3)
    scale = unit_scale(x) if normalize == "mean_norm" else torch.ones(())
    assert sae.x_scale == sae.y_scale == scale
    x = x * scale
    expected = {"zeros": torch.zeros(6), "mean": x.mean(dim=0), "geometric_median": geometric_median(x)}
    torch.testing.assert_close(sae.b_dec.detach(), expected[how])
    torch.testing.assert_close(sae.y_mean, x.mean(dim=0))
    torch.testing.assert_close(sae.y_variance, x.var(dim=0, correction=0).sum())
    assert sae.b_enc.abs().sum() == 0


@pytest.mark.parametrize(("scale", "norm"), [("auto", TopK.traits.encoder_scale), (0.7, 0.7)])
@pytest.mark.parametrize("how", ["tied", "independent"])
def test_the_encoder_starts_tied_or_independent_and_with_the_configured_scale(
    how: str, scale: float | str, norm: float, make_job: MakeJob
) -> None:
    sae = new_topk()
    initialise(sae, sample(), sample(), make_job(sae={"encoder_init": how, "encoder_scale": scale}).sae, seed=3)
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(20))
    torch.testing.assert_close(sae.W_enc.norm(dim=0), torch.full((20,), norm))
    cosines = (sae.W_enc.T * sae.W_dec).sum(dim=1) / norm
    assert (cosines > 1 - 1e-6).all() if how == "tied" else cosines.abs().mean() < 0.6


def test_a_transcoder_starts_from_the_geometric_medians_of_input_and_target(
    make_job: MakeJob,
) -> None:
    x, y = sample(), 100 * sample(d=4, seed=1)
    sae = new_sae(BatchTopK, 6, 20, 4, k=2)
    initialise(sae, x, y, make_job().sae, seed=3)
    assert (sae.x_scale, sae.y_scale) == (unit_scale(x), unit_scale(y))
    torch.testing.assert_close(sae.b_dec.detach(), geometric_median(y * sae.y_scale))
    torch.testing.assert_close(sae.input_bias, geometric_median(x * sae.x_scale))
    assert not sae.b_enc.any()
    assert sae.W_dec.shape == (20, 4)


@pytest.mark.parametrize(
    ("x", "told"),
    [
        (torch.full((50, 6), 3.0), "all activations are the same"),
        (torch.zeros(50, 6), "all activations are the same"),
        (1e20 * torch.randn(50, 6), "too large for fp32"),
        (1e-24 * torch.randn(50, 6), "too small for fp32; scale them up"),
    ],
    ids=["equal rows", "zeros", "huge", "tiny"],
)
def test_data_that_an_sae_cannot_learn_from_is_refused(x: Tensor, told: str, make_job: MakeJob) -> None:
    with pytest.raises(UserError, match=rf"^data\.path: .*{told}"):
        initialise(new_topk(), x, x, make_job().sae, seed=0)


def test_the_seed_determines_the_weights(make_job: MakeJob) -> None:
    weights = []
    for seed in (1, 1, 2):
        sae = new_topk()
        initialise(sae, sample(4), sample(4), make_job().sae, seed)
        weights.append(sae.W_dec.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])

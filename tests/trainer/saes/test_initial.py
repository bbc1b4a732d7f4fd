from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer.contract.config import JobConfig
from trainer.saes.initial import geometric_median, initialise
from trainer.saes.topk import TopK


def test_a_few_giant_tokens_do_not_move_the_geometric_median() -> None:
    points = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0)) + 5
    points[:20] *= 1000
    assert (points.mean(dim=0) - 5).abs().max() > 10
    assert (geometric_median(points) - 5).abs().max() < 0.2


def test_the_geometric_median_of_points_on_itself_is_that_point() -> None:
    assert geometric_median(torch.full((9, 3), 2.5)).tolist() == [2.5] * 3


@pytest.mark.parametrize("how", ["geometric_median", "mean", "zeros"])
def test_the_encoder_starts_tied_to_a_unit_decoder_and_b_dec_from_the_data(
    how: str, make_job: Callable[..., JobConfig]
) -> None:
    settings = make_job(sae={"b_dec_init": how, "encoder_scale": 0.3}).sae
    sample = torch.randn(500, 6) + 4
    sae = TopK(6, 20, k=2, k_aux=None, auxk_alpha=0.0, dead_after_tokens=1)
    initialise(sae, sample, settings, seed=3)
    torch.testing.assert_close(sae.W_dec.norm(dim=1), torch.ones(20))
    torch.testing.assert_close(sae.W_enc, 0.3 * sae.W_dec.T)
    expected = {"zeros": torch.zeros(6), "mean": sample.mean(dim=0), "geometric_median": geometric_median(sample)}
    torch.testing.assert_close(sae.b_dec.detach(), expected[how])
    torch.testing.assert_close(sae.x_variance, sample.var(dim=0, correction=0).sum())


def test_the_seed_fixes_the_weights(make_job: Callable[..., JobConfig]) -> None:
    made = []
    for seed in (1, 1, 2):
        sae = TopK(6, 20, k=2, k_aux=None, auxk_alpha=0.0, dead_after_tokens=1)
        initialise(sae, torch.ones(4, 6), make_job().sae, seed)
        made.append(sae.W_dec.detach())
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])

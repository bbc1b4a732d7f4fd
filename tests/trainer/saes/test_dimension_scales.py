"""Tests that the per-dimension scales used in training are folded exactly into the exported weights."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support.saes import D_IN, KINDS, batch, random_sae
from torch import Tensor

from trainer.activations.heavy_dimensions import changed_scales, dimension_scales, scales_sentence
from trainer.contract.settings.job import DataSettings
from trainer.contract.settings.sources import ShardSettings
from trainer.saes.base import Sae

SETTINGS = ShardSettings("acts")
SHAPES = [(None, False), (7, False), (7, True)]


@torch.no_grad()
def scaled_sae(kind: str, d_out: int | None, skip: bool, x_scale: Tensor, y_scale: Tensor) -> Any:
    """Create a random float64 SAE whose weights are zero in dimensions with scale 0, where it stores the mean."""
    kind_class, own, _ = KINDS[kind]
    sae = random_sae(kind_class, D_IN, 40, *([d_out] if d_out else []), scales_dimensions=True, **own)
    if skip:
        sae.W_skip = torch.nn.Parameter(torch.randn(D_IN, sae.d_out, dtype=torch.float64) * (y_scale > 0))
    sae.x_scale.copy_(x_scale)
    sae.y_scale.copy_(y_scale)
    sae.dropped_mean.copy_(torch.randn(sae.d_out, dtype=torch.float64) * (y_scale == 0))
    for tensor in (sae.W_dec, sae.b_dec):
        tensor.mul_((y_scale > 0).double())
    if d_out:
        sae.x_mean.copy_(batch(1)[0] * (x_scale > 0))
    if hasattr(sae, "threshold"):
        sae.threshold.abs_()
    return sae.eval()


def by_hand(sae: Sae, weights: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute activations and reconstructions from exported tensors, as SAELens does."""
    product = (x if sae.is_transcoder else x - weights["b_dec"]) @ weights["W_enc"]
    if "r_mag" in weights:
        acts = (product * weights["r_mag"].exp() + weights["b_mag"]).relu() * (product + weights["b_gate"] > 0)
    else:
        pre_acts = product + weights["b_enc"]
        if "threshold" in weights:
            acts = pre_acts.relu() * (pre_acts > weights["threshold"])
        elif "topk" in sae.export_config()["architecture"]:
            acts = pre_acts.relu() * (pre_acts >= pre_acts.topk(8, dim=1).values[:, -1:])
        else:
            acts = pre_acts.relu()
    x_hat = acts @ weights["W_dec"] + weights["b_dec"]
    return acts, x_hat + x @ weights["W_skip"].T if "W_skip" in weights else x_hat


scales = st.lists(st.sampled_from([0.0, 1.0, 1.0, 0.5, 0.01]), min_size=D_IN, max_size=D_IN).filter(
    lambda one: 1.0 in one
)


@pytest.mark.parametrize(("d_out", "skip"), SHAPES, ids=["sae", "transcoder", "skip"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8)
@given(of_x=scales, of_y=scales.filter(lambda one: 1.0 in one[:7]), unit=st.sampled_from([0.3, 20.0]))
@torch.no_grad()
def test_the_exported_sae_on_raw_rows_matches_the_trained_sae_on_scaled_rows(
    kind: str, d_out: int | None, skip: bool, of_x: list[float], of_y: list[float], unit: float
) -> None:
    if d_out and kind == "gated":
        return
    x_scale = unit * torch.tensor(of_x, dtype=torch.float64)
    y_scale = torch.tensor(of_y[:d_out], dtype=torch.float64) if d_out else x_scale
    sae, raw = scaled_sae(kind, d_out, skip, x_scale, y_scale), batch() / unit
    trained = sae(raw * x_scale, torch.zeros(len(raw), sae.d_out, dtype=torch.float64))
    kept = y_scale > 0
    expected = sae.dropped_mean.expand_as(trained.x_hat).clone()
    expected[:, kept] = trained.x_hat[:, kept] / y_scale[kept]
    weights = sae.export_weights()
    acts, x_hat = by_hand(sae, weights, raw)
    torch.testing.assert_close(x_hat, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(acts, trained.acts.dense() / y_scale.max(), rtol=1e-9, atol=1e-9)
    assert not weights["W_enc"][x_scale == 0].any()
    assert not weights["W_dec"][:, ~kept].any()
    torch.testing.assert_close(weights["b_dec"][~kept], sae.dropped_mean[~kept])
    torch.testing.assert_close(sae.raw(trained.x_hat), expected, rtol=1e-12, atol=1e-12)


def test_dimensions_with_over_three_times_the_median_spread_are_scaled_down() -> None:
    rows = torch.randn(20_000, 8, generator=torch.Generator().manual_seed(0)) + 5
    rows *= torch.tensor([1.0, 1.0, 1.0, 1.0, 2.0, 6.0, 300.0, 0.0])
    scales = dimension_scales(rows, DataSettings(settings=SETTINGS, scale_dimensions="auto", drop_dimensions=[4]))
    assert scales[:4].tolist() == [1.0] * 4
    assert scales[4] == 0
    assert scales[7] == 1
    spread = (rows * scales).std(0)
    torch.testing.assert_close(spread[5:7], torch.tensor([3.0, 3.0]), rtol=0.03, atol=0)
    changed = changed_scales(scales)
    assert [*changed] == ["4", "5", "6"]
    assert scales_sentence(changed, 8).startswith(
        "1 dimension of 8 (number 4) left out, 2 dimensions of 8 (numbers 6 and 5) scaled down by up to "
    )
    assert dimension_scales(rows, DataSettings(settings=SETTINGS)).tolist() == [1.0] * 8
    assert scales_sentence({}, 8) == ""

"""Tests that a final norm is recognised by its effect on rows rather than by its parameter names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.extraction.unembedding import Unembedding, folded


class Shifted(nn.Module):
    """A norm that multiplies by its weight plus 1, like Gemma's."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + self.weight)


@pytest.mark.parametrize("d", [8, 9])
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, Shifted])
def test_the_weight_and_mean_of_a_norm_are_folded_into_the_unembedding(kind: type[nn.Module], d: int) -> None:
    torch.manual_seed(0)
    norm, w_u = kind(d), torch.randn(5, d)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    directions = torch.randn(3, d)
    scale = norm.weight + 1 if kind is Shifted else norm.weight
    moved = directions - directions.mean(1, keepdim=True) if kind is nn.LayerNorm else directions
    torch.testing.assert_close(
        directions @ folded(Unembedding(norm, w_u)), (moved * scale) @ w_u.T, rtol=1e-4, atol=1e-4
    )


def test_without_a_norm_the_unembedding_is_unchanged() -> None:
    w_u = torch.randn(5, 8)
    assert torch.equal(folded(Unembedding(None, w_u)), w_u.T)

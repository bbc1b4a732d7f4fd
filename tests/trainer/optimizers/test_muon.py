from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from trainer.optimizers.adam import Adam
from trainer.optimizers.muon import Muon, orthogonal


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 50), (50, 16), (20, 20)])
@pytest.mark.parametrize("size", [1e-12, 1.0, 1e9])
def test_singular_values_become_about_1_and_singular_vectors_do_not_change(shape: tuple[int, int], size: float) -> None:
    matrix = size * random(*shape)
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    product = left.T @ orthogonal(matrix).double() @ right.T
    values = product.diagonal()
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.3
    torch.testing.assert_close(product - values.diag(), torch.zeros_like(product), rtol=0, atol=1e-4)


def test_orthogonalising_an_all_zero_matrix_gives_zeros() -> None:
    assert not orthogonal(torch.zeros(4, 9)).any()


def naive(weight: Tensor, gradients: list[Tensor], lr: float, momentum: float) -> Tensor:
    """Return the weight after muon.py's updates in float64: Nesterov momentum and a polynomial in singular values."""
    weight, buffer = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        buffer = momentum * buffer + (1 - momentum) * gradient
        ahead = momentum * buffer + (1 - momentum) * gradient
        left, values, right = torch.linalg.svd(ahead, full_matrices=False)
        values = values / values.norm()
        for _ in range(5):
            values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
        weight = weight - lr * 0.2 * math.sqrt(max(weight.shape)) * left @ values.diag() @ right
    return weight


@pytest.mark.parametrize("shape", [(12, 40), (40, 12)])
def test_matrix_updates_match_the_muon_algorithm(shape: tuple[int, int]) -> None:
    weight, gradients = nn.Parameter(random(*shape)), [random(*shape, seed=seed) for seed in range(1, 9)]
    expected = naive(weight.detach(), gradients, 0.1, 0.95)
    optimizer = Muon([weight], 0.1, momentum=0.95, beta1=0.9, beta2=0.999)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    torch.testing.assert_close(weight.double(), expected, rtol=1e-4, atol=1e-4)


def test_matrix_updates_are_about_as_large_as_adam_updates() -> None:
    lengths = []
    for optimizer_class, settings in ((Muon, {"momentum": 0.95}), (Adam, {"state": "fp32"})):
        weight = nn.Parameter(torch.zeros(30, 200))
        optimizer = optimizer_class([weight], 0.01, beta1=0.9, beta2=0.999, **settings)
        for seed in range(100):
            before = weight.detach().clone()
            weight.grad = random(30, 200, seed=seed)
            optimizer.step()
        lengths.append(float((weight.detach() - before).norm()))
    assert 0.5 < lengths[0] / lengths[1] < 2


def test_biases_are_updated_by_adam() -> None:
    bias, same = (nn.Parameter(random(30)) for _ in range(2))
    muon = Muon([bias], 0.01, momentum=0.95, beta1=0.8, beta2=0.99)
    adam = Adam([same], 0.01, beta1=0.8, beta2=0.99, state="fp32")
    for seed in range(9):
        bias.grad, same.grad = random(30, seed=seed), random(30, seed=seed)
        muon.step()
        adam.step()
    torch.testing.assert_close(bias, same)

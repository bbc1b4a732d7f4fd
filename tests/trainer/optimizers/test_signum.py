from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainer.optimizers.signum import Signum

RATES = [0.001, 0.01, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03]


def target(step: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def gradient(weight: Tensor, step: int) -> Tensor:
    """Return a gradient that is 0 for one latent, a different one at each step."""
    difference = weight - target(step, tuple(weight.shape)).to(weight)
    difference[..., step % weight.shape[-1]] = 0
    return difference


def naive(start: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    """Compute x and y from Defazio et al. in float64, with each step weighted by the square of its learning rate."""
    x = z = start.double()
    total = 0.0
    for step, rate in enumerate(RATES):
        y = (1 - momentum) * z + momentum * x
        z = z - rate * gradient(y, step).sign()
        total += rate**2
        x = x + rate**2 / total * (z - x)
    return x, (1 - momentum) * z + momentum * x


@pytest.mark.parametrize("momentum", [0.95, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(6, 20), (20,)])
def test_the_weights_and_their_average_follow_the_equations_in_the_paper(
    momentum: float, shape: tuple[int, ...]
) -> None:
    weight = nn.Parameter(target(99, shape))
    x, y = naive(weight.detach(), momentum)
    optimizer = Signum([weight], 1.0, momentum=momentum)
    for step, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = gradient(weight.detach(), step)
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), y, rtol=1e-5, atol=1e-6)
    optimizer.use_trained_weights()
    torch.testing.assert_close(weight.detach().double(), x, rtol=1e-5, atol=1e-6)
    optimizer.use_stepped_weights()
    torch.testing.assert_close(weight.detach().double(), y, rtol=1e-5, atol=1e-6)


def test_gradient_magnitude_does_not_change_the_step() -> None:
    results = []
    for size in (1e-20, 1.0, 1e20):
        weight = nn.Parameter(torch.zeros(3, 4))
        optimizer = Signum([weight], 0.01, momentum=0.95)
        for step in range(4):
            weight.grad = size * target(step, (3, 4))
            optimizer.step()
        results.append(weight.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_average_has_less_noise_than_the_stepped_weights() -> None:
    # The minimum is at 0, but the raw weights keep moving around it at a distance of about one step.
    weight = nn.Parameter(torch.full((500,), 0.3))
    optimizer = Signum([weight], 0.05, momentum=0.95)
    for step in range(400):
        weight.grad = weight.detach() + target(step, (500,))
        optimizer.step()
    stepped = optimizer.state[weight]["z"].square().mean()
    optimizer.use_trained_weights()
    assert float(weight.detach().square().mean()) < 0.1 * float(stepped)

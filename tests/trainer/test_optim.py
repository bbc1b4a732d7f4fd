from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainer.contract.config import JobConfig
from trainer.optim import autocast, base_lr, clip_gradients, computes_bf16

CPU = torch.device("cpu")


def test_auto_follows_the_width_and_a_given_rate_is_taken_as_it_is(make_job: Callable[..., JobConfig]) -> None:
    auto = make_job(train={"lr": "auto"}).train
    assert base_lr(auto, 3072) == pytest.approx(6e-3)
    assert base_lr(auto, 4 * 3072) == pytest.approx(3e-3)
    assert base_lr(make_job(train={"lr": 0.01}).train, 9999) == 0.01


@pytest.mark.parametrize(("precision", "enabled"), [("auto", False), ("fp32", False), ("tf32", False), ("bf16", True)])
def test_on_a_cpu_only_bf16_by_name_uses_bf16(precision: str, enabled: bool) -> None:
    with autocast(precision, CPU):
        assert torch.is_autocast_enabled("cpu") is enabled


@pytest.mark.parametrize(("largest", "norm"), [(1.0, 1.0), (10.0, 5.0), (0.0, 5.0)])
def test_gradients_are_clipped_by_their_global_norm_and_never_by_zero(largest: float, norm: float) -> None:
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for weight, gradient in zip(weights, (3.0, 4.0), strict=True):
        weight.grad = torch.tensor([gradient])
    assert float(clip_gradients(weights, largest)) == pytest.approx(5.0)
    assert float(torch.cat([weight.grad for weight in weights]).norm()) == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(("capability", "enabled"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_auto_is_bf16_only_on_cards_that_compute_it(
    capability: tuple[int, int], enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No machine has cards of all these generations.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert computes_bf16(torch.device("cuda", 0)) is enabled
    assert not computes_bf16(CPU)

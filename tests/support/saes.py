"""SAEs with random weights in float64, and what they are compared by."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer.saes.base import Sae

D_IN, D_SAE = 12, 40


def random_sae(kind: type[Sae], *shape: int, **knobs: Any) -> Any:
    """Make a float64 SAE of random weights and unit decoder rows, with nothing dead before 100 tokens."""
    sae = kind(*(shape or (D_IN, D_SAE)), **knobs)
    sae.dead_after_tokens = 100
    sae = sae.double()
    torch.manual_seed(1)
    for parameter in sae.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    sae.normalise_decoder()
    sae.y_variance.fill_(3.0)
    return sae


def batch(n_tokens: int = 33, d_in: int = D_IN, seed: int = 2) -> Tensor:
    return torch.randn(n_tokens, d_in, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(sae: Sae, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every parameter, zeros where it has no part in the loss."""
    names, parameters = zip(*sae.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True, materialize_grads=True)
    return dict(zip(names, grads, strict=True))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        named = partial("{}: {}".format, name)
        torch.testing.assert_close(tensor, expected[name], msg=named, **tolerance)


def peers_twin(peer_class: Any, config_class: Any, sae: Sae, **settings: Any) -> Any:
    """Make SAELens' own training class with the weights of `sae`, in float64."""
    config = config_class(d_in=sae.d_in, d_sae=sae.d_sae, dtype="float64", device="cpu", **settings)
    twin = peer_class(config)
    twin.load_state_dict({**twin.state_dict(), **{name: value.detach() for name, value in sae.named_parameters()}})
    return twin


def peers_losses(twin: Any, x: Tensor, dead: Tensor | None = None) -> dict[str, Tensor]:
    """Return SAELens' loss terms, which are means over tokens."""
    from sae_lens.saes.sae import TrainStepInput  # type: ignore[import-untyped]

    weights = {"l0": 1.0, "l1": 1.0}
    step = TrainStepInput(
        sae_in=x, coefficients=weights, dead_neuron_mask=dead, n_training_steps=0, is_logging_step=False
    )
    output = twin.training_forward_pass(step)
    return {**output.losses, "loss": output.loss, "x_hat": output.sae_out, "acts": output.feature_acts}

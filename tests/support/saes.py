"""SAEs with random weights in float64, and helpers to compare them."""

from __future__ import annotations

import importlib
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.contract.settings.catalog import ARCHITECTURES
from trainer.saes.base import Sae, SaeSpec
from trainer.saes.batch_topk import BatchTopK
from trainer.saes.gated import Gated
from trainer.saes.hierarchical_topk import HierarchicalTopK
from trainer.saes.jumprelu import JumpReLU
from trainer.saes.kernels.dead_latents import Weights
from trainer.saes.matryoshka import MatryoshkaBatchTopK
from trainer.saes.standard import Standard
from trainer.saes.topk import TopK

# The folder where `make model` installs SAE tools from other projects.
PEERS = Path(sys.prefix) / "peers"
D_IN, D_SAE = 12, 40
TOPK = {"k": 8, "auxk_alpha": 0.0}
PENALISED = {"k": 8, "sparsity_warmup_fraction": 0.0}
# Maps each architecture to its class, its settings, and its name in SAELens.
KINDS: dict[str, Any] = {
    "topk": (TopK, TOPK, "topk"),
    "hierarchical_topk": (HierarchicalTopK, TOPK | {"n_levels": 3}, "topk"),
    "batch_topk": (BatchTopK, TOPK, "jumprelu"),
    "matryoshka_batch_topk": (MatryoshkaBatchTopK, TOPK | {"n_levels": 3}, "jumprelu"),
    "jumprelu": (JumpReLU, PENALISED, "jumprelu"),
    "gated": (Gated, PENALISED, "gated"),
    "standard": (Standard, PENALISED, "standard"),
}
TRANSCODERS = {
    "batch_topk": "jumprelu_transcoder",
    "matryoshka_batch_topk": "jumprelu_transcoder",
    "jumprelu": "jumprelu_transcoder",
    "standard": "transcoder",
}


def new_sae(kind: type[Sae], d_in: int = D_IN, d_sae: int = D_SAE, d_out: int | None = None, **settings: Any) -> Any:
    """Create an SAE with zero weights; `settings` are settings of the architecture or fields of `SaeSpec`."""
    own = next(one.settings for one in ARCHITECTURES.values() if one.load() is kind)
    of_spec = {name: settings.pop(name) for name in SaeSpec.__struct_fields__ if name in settings}
    return kind(SaeSpec(d_in, d_sae, own(**settings), d_out, **of_spec))


def random_sae(kind: type[Sae], *shape: int, **settings: Any) -> Any:
    """Create a float64 SAE with random weights and unit decoder rows. A latent is dead if it has not fired for 100
    tokens.
    """
    sae = new_sae(kind, *shape, dead_after_tokens=100, **settings).double()
    torch.manual_seed(1)
    for parameter in sae.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    sae.normalise_decoder()
    sae.y_variance.fill_(3.0)
    return sae


def batch(n_tokens: int = 33, d_in: int = D_IN, seed: int = 2) -> Tensor:
    return torch.randn(n_tokens, d_in, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def gradients(sae: Sae, loss: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every parameter, or zeros if the parameter does not affect the loss."""
    names, parameters = zip(*sae.named_parameters(), strict=True)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True, materialize_grads=True)
    # Detach the gradients: PyTorch 2.6 returns zeros that require a gradient and therefore cannot be changed in place.
    of_each = {name: grad.detach() for name, grad in zip(names, grads, strict=True)}
    for one in sae.row_gradients.take() if isinstance(sae, Sae) else []:
        wholes = Weights(of_each["W_enc"], of_each["b_enc"], of_each["W_dec"])
        one.add_to(wholes, None if one.input_bias is None else of_each["b_dec"])
    return of_each


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: Any) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        named = partial("{}: {}".format, name)
        torch.testing.assert_close(tensor, expected[name], msg=named, **tolerance)


def peers_twin(peer_class: Any, config_class: Any, sae: Sae, **settings: Any) -> Any:
    """Create an instance of SAELens's training class with the weights of `sae`, in float64."""
    config = config_class(d_in=sae.d_in, d_sae=sae.d_sae, dtype="float64", device="cpu", **settings)
    twin = peer_class(config)
    twin.load_state_dict({**twin.state_dict(), **{name: value.detach() for name, value in sae.named_parameters()}})
    return twin


def peers_losses(twin: Any, x: Tensor, dead: Tensor | None = None) -> dict[str, Tensor]:
    """Return SAELens's loss terms, which are means over tokens."""
    from sae_lens.saes.sae import TrainStepInput  # type: ignore[import-untyped]

    weights = {"l0": 1.0, "l1": 1.0}
    step = TrainStepInput(
        sae_in=x, coefficients=weights, dead_neuron_mask=dead, n_training_steps=0, is_logging_step=False
    )
    output = twin.training_forward_pass(step)
    return {**output.losses, "loss": output.loss, "x_hat": output.sae_out, "acts": output.feature_acts}


def made(
    kind: str = "topk", d_out: int | None = None, x_scale: float = 1.0, y_scale: float = 1.0, *, skip: bool = False
) -> Sae:
    """Create an SAE with 32 input dimensions, 128 latents and random weights; `skip` adds a skip connection."""
    torch.manual_seed(0)
    kind_class, settings, _ = KINDS[kind]
    sae: Sae = new_sae(kind_class, 32, 128, d_out, has_skip=skip, **settings)
    for parameter in sae.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    sae.normalise_decoder()
    sae.x_scale.fill_(x_scale)
    sae.y_scale.fill_(y_scale)
    if sae.is_transcoder:
        torch.nn.init.normal_(sae.x_mean)
    return sae.eval()


def put_bar_into_a_gap(sae: Sae, x: Tensor) -> None:
    """Set the threshold so that about 8 latents per token exceed it, and rounding cannot change which latents do."""
    if isinstance(sae, TopK) and not isinstance(sae, BatchTopK):
        return
    centred = x - sae.input_bias
    thresholds = sae.threshold if isinstance(sae, JumpReLU) else torch.zeros(())
    above_own = torch.addmm(sae.b_enc, centred, sae.W_enc) - thresholds
    largest = above_own.flatten().topk(8 * len(x) + 50).values[-100:]
    widest = (largest[:-1] - largest[1:]).argmax()
    bar = largest[widest : widest + 2].mean()
    if isinstance(sae, BatchTopK):
        sae.threshold.copy_(bar)
    elif isinstance(sae, JumpReLU):
        sae.threshold.add_(bar)
    else:
        sae.b_enc.sub_(bar)


def peer(monkeypatch: pytest.MonkeyPatch, module: str, *unused: str) -> Any:
    """Import a module from another tool installed by `make model`; skip the test if it is missing.

    The module also imports the packages in `unused`, which may be missing because this test does not need them.
    """
    # Append the folder so that packages in the virtual environment take precedence.
    monkeypatch.setattr(sys, "path", [*sys.path, str(PEERS)])
    for name in unused:
        try:
            importlib.import_module(name)
        except ImportError:
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
            sys.modules[name].__dict__.update(LanguageModel=None)
    return pytest.importorskip(module, reason=f"{module.partition('.')[0]} is not installed; `make model` downloads it")

"""A model larger than one GPU is spread over several GPUs, block by block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import dispatch_model
from support.extractions import CPU, extraction_job
from support.tiny_models import FAMILIES, N_BLOCKS

from trainer.contract.errors import UserError
from trainer.extraction.language_model import LanguageModel
from trainer.extraction.packing import ContextBatch
from trainer.extraction.spread import places

Load = Callable[[str], LanguageModel]


@pytest.fixture
def load(tiny: Callable[[str], Path]) -> Load:
    """Return a function that loads a tiny model of a family, with hooks in its first and its last block."""
    hooks = ["mlp_in.0", f"resid_post.{N_BLOCKS - 1}"]
    return lambda family: LanguageModel(extraction_job(tiny(family), Path("text"), Path("rows"), hooks=hooks), CPU)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_block_is_on_one_gpu_and_blocks_keep_their_order(load: Load, family: str) -> None:
    model = load(family)._model
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    capacity = n_bytes * 9 // 10
    chosen = places(model, {0: capacity, 1: capacity, "cpu": 10 * n_bytes})
    gpus = {
        name: next(gpu for module, gpu in chosen.items() if f"{name}.".startswith(f"{module}."))
        for name, _ in model.named_parameters()
    }
    assert list(gpus.values()) == sorted(gpus.values())
    assert {*gpus.values()} == {0, 1}
    blocks = next(name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList))
    for number in range(N_BLOCKS):
        assert len({gpu for name, gpu in gpus.items() if name.startswith(f"{blocks}.{number}.")}) == 1


def test_gpus_that_are_too_small_together_are_refused_in_a_sentence(load: Load) -> None:
    with pytest.raises(UserError, match=r"^model.spread: the model does not fit on 2 GPUs; give more in launch.gpus$"):
        places(load("llama")._model, {0: 5_000, 1: 5_000, "cpu": 10**12})


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_the_same_if_modules_move_their_inputs_between_devices(load: Load, family: str) -> None:
    model, ids = load(family), np.arange(24).reshape(2, 12)
    batch = ContextBatch(ids, np.tile(np.arange(12), (2, 1)), np.repeat([[0], [1]], 12, axis=1))
    before = model.rows(batch, torch.arange(24))
    # Accelerate wraps the forward pass of each module, even if all are on one device.
    modules = {name: torch.device("cpu") for name, part in model._model.named_modules() if not [*part.children()]}
    dispatch_model(model._model, modules, force_hooks=True)
    assert any(hasattr(part, "_hf_hook") for part in model._model.modules())
    for one, other in zip(before, model.rows(batch, torch.arange(24)), strict=True):
        assert torch.equal(one, other)

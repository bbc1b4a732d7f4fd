"""Machines on which Triton cannot run a kernel: users of kernels are told so, and go without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest
import torch

from trainer.optimizers import row_adam
from trainer.runtime.triton_kernels import working_kernels
from trainer.saes import losses
from trainer.saes.kernels import dead_latents, silence, sparse, top_k
from trainer.training import gradients


@pytest.mark.parametrize(
    ("kernels_of", "purpose"),
    [
        (partial(sparse._working_triton, dtype=torch.bfloat16), "sparse products in bfloat16"),
        (top_k._working_triton, "choices of latents"),
        (partial(dead_latents._working_triton, dtype=torch.float16), "weights of dead latents in float16"),
        (losses._working_triton, "errors of reconstructions"),
        (silence._working_triton, "counts of silent latents"),
        (gradients._working_triton, "scales of gradients"),
        (row_adam._working_kernels, "steps"),
    ],
)
def test_a_machine_where_triton_fails_is_told_so_and_goes_without(
    kernels_of: Callable[[torch.device], ModuleType | None], purpose: str
) -> None:
    # There is nothing to run a kernel on but this CPU. It is told once.
    working_kernels.cache_clear()
    with pytest.warns(UserWarning, match=f"{purpose} on cpu go without Triton"):
        assert kernels_of(torch.device("cpu")) is None

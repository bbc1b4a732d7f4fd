"""Runs the kernels, in Triton's interpreter if there is no GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from support.interpreted import run_cases

from trainer.saes.kernels import dead_latents

CASES = Path(__file__).with_name("dead_latent_cases.py")


def test_the_kernels_agree_with_single_operations() -> None:
    run_cases(CASES)


def test_a_cpu_does_not_use_triton() -> None:
    assert dead_latents.triton_for(torch.zeros(1, dtype=torch.int64), torch.bfloat16) is None

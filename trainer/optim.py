"""Adam, its learning rate, and the arithmetic of the matrix products."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from trainer.contract.config import Train


def adam(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Adam:
    """Adam in one fused kernel: it moves 28 bytes per parameter, several kernels would move twice that.

    The small eps is Gao et al.'s: rare latents have gradients near 1e-8, which eps = 1e-8 would halve.
    """
    return torch.optim.Adam(parameters, lr=lr, betas=(0.9, 0.999), eps=6.25e-10, fused=True)


def base_lr(train: Train, d_sae: int) -> float:
    """The full learning rate; "auto" follows the 1/√d_sae law of Gao et al. from a measured point.

    With 3,072 latents, k = 32, batches of 4,096 and 500 steps, FVU was 0.121 at 3e-3, 0.114 at 6e-3 and 0.114 at
    1.2e-2, where 6 % of latents died. Short runs need no lower rate: with 1,536 latents and 50 steps of 1,024 tokens
    it was 0.205 at this rule's 8.5e-3, 0.221 at 4e-3, 0.264 at 2e-3 and 0.212 at 1.6e-2.
    """
    return 6e-3 * math.sqrt(3072 / d_sae) if train.lr == "auto" else train.lr


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """bf16 matrix products where asked for, and by default where they are fast."""
    wanted = precision == "bf16" or (precision == "auto" and computes_bf16(device))
    return torch.autocast(device.type, torch.bfloat16) if wanted else contextlib.nullcontext()


def computes_bf16(device: torch.device) -> bool:
    """Cards before compute capability 8.0 only emulate bf16, which is slower than fp32, as it mostly is on CPUs."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def set_matmul_precision(precision: str) -> None:
    """TF32 for "tf32" and for what bf16 leaves in fp32; exact products for "fp32"."""
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scales gradients so that their global norm is at most `largest` (0: never); the norm, on the device."""
    return nn.utils.clip_grad_norm_(parameters, largest or math.inf)

"""The end of a step for what was counted in it: which latents were silent, and for how many tokens."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from trainer.runtime.triton_kernels import working_kernels


@torch.no_grad()
def take_in(silence: Tensor, sums: Tensor, n_tokens: Tensor) -> Tensor:
    """Add a step's tokens (0-dim) to those for which each latent was silent [n], unless it fired; clear `sums` [n + m].

    These begin with on how many tokens each latent fired; return what they had beside it [m]. Where there are no tokens
    nothing was counted, whatever is in them. The number is not to be one of them.
    """
    if silence.is_cuda and (triton := _working_triton(silence.device)):
        by_kernel: Tensor = triton.take_in(silence, sums, n_tokens)
        return by_kernel
    n = len(silence)
    sums.masked_fill_(n_tokens == 0, 0)
    silence.add_(n_tokens.long()).masked_fill_(sums[:n] > 0, 0)
    others = sums[n:].clone()
    sums.zero_()
    return others


def _working_triton(device: torch.device) -> ModuleType | None:
    return working_kernels("trainer.saes.kernels.triton_silence", "counts of silent latents", device)

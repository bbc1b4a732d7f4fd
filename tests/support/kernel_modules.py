"""The trainer modules that request Triton kernels during a step, and the kernel module of each."""

from __future__ import annotations

from types import ModuleType

from trainer.metrics import interval, triton_interval
from trainer.saes import losses
from trainer.saes.kernels import (
    dead_latents,
    encode,
    since_fired,
    sparse,
    top_k,
    top_k_across_ranks,
    triton_dead_latents,
    triton_encode,
    triton_entries,
    triton_errors,
    triton_since_fired,
    triton_sparse,
    triton_top_k,
)
from trainer.training import gradients, triton_scale

# A function `_working_triton` requests each kernel. The optimizer's kernel is requested by another function.
KERNELS: dict[ModuleType, ModuleType] = {
    encode: triton_encode,
    top_k: triton_top_k,
    top_k_across_ranks: triton_entries,
    sparse: triton_sparse,
    losses: triton_errors,
    dead_latents: triton_dead_latents,
    since_fired: triton_since_fired,
    interval: triton_interval,
    gradients: triton_scale,
}

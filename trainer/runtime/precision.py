"""The arithmetic of the matrix products; weights and their updates stay fp32."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any

import torch

from trainer.contract.planning.hardware import BF16_FROM, FP16_FROM, auto_precision

# Names of AMD's architectures, which may go on with features, as in `gfx90a:sramecc+`: GCN to Vega 20, RDNA 1 and 2.
_OLD_AMD = re.compile(r"gfx(?:[678]|90[0-69]|90c|10)")
# The type to which products narrow their operands.
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(precision: str, device: torch.device) -> str:
    """Replace "auto" by what suits this device, whose compute capability is known here."""
    if precision != "auto":
        return precision
    return auto_precision(device.type, _capability(device) if device.type == "cuda" else (0, 0))


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, for AMD's cards that of NVIDIA's which are fast at the same.

    What PyTorch calls the capability of those are the numbers of other things, (10, 3) for RDNA 2, say.
    """
    if not torch.version.hip:
        return torch.cuda.get_device_capability(device)
    architecture = torch.cuda.get_device_properties(device).gcnArchName
    return FP16_FROM if _OLD_AMD.match(architecture) else BF16_FROM


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context that narrows matrix products where the resolved `precision` asks for it."""
    narrow = NARROW.get(precision)
    return torch.autocast(device.type, narrow) if narrow else contextlib.nullcontext()


def set_matmul_precision(precision: str) -> None:
    """Allow TF32 for "tf32" and for what narrow products leave in fp32; demand exact products for "fp32".

    Products of 16 bits add their parts in fp32: sums over many tokens would lose digits, or overflow fp16.
    """
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def set_deterministic(deterministic: bool) -> None:
    """Allow only kernels that give the same result every time; torch then refuses to run where there is none."""
    # torch.use_deterministic_algorithms does the same, but takes two seconds, in which it loads torch's compiler.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # Read by the compiler once it is loaded.
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(deterministic))
    compiler: Any = sys.modules.get("torch._inductor.config")
    # Older ones have no such option, and refuse names that they do not know.
    if hasattr(compiler, "deterministic"):
        compiler.deterministic = deterministic
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, False
    if deterministic:
        # cuBLAS asks for this before it makes its first workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

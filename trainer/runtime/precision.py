"""Sets the matmul precision; weights and weight updates stay in fp32."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import Any

import torch

from trainer.contract.planning.hardware import BF16_FROM, FP16_FROM, auto_precision

# AMD architectures without fast bf16: GCN to Vega 20, RDNA 1 and 2. Features may follow the name, as in
# `gfx90a:sramecc+`.
_OLD_AMD = re.compile(r"gfx(?:[678]|90[0-69]|90c|10)")
# The matmul operand dtype for each 16-bit precision.
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def resolve_precision(precision: str, device: torch.device) -> str:
    """Replace "auto" with the most suitable precision for a device."""
    if precision != "auto":
        return precision
    return auto_precision(device.type, _capability(device) if device.type == "cuda" else (0, 0))


def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; for an AMD GPU, return the value for NVIDIA GPUs with the same fast dtypes.

    For AMD GPUs, PyTorch reports the architecture number instead, such as (10, 3) for RDNA 2.
    """
    if not torch.version.hip:
        return torch.cuda.get_device_capability(device)
    architecture = torch.cuda.get_device_properties(device).gcnArchName
    return FP16_FROM if _OLD_AMD.match(architecture) else BF16_FROM


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return an autocast context for a 16-bit `precision`, or a context that has no effect for any other."""
    narrow = NARROW.get(precision)
    return torch.autocast(device.type, narrow) if narrow else contextlib.nullcontext()


def set_matmul_precision(precision: str) -> None:
    """Require full fp32 matmuls for "fp32"; otherwise allow TF32, including for fp32 matmuls in a 16-bit run.

    16-bit matmuls always accumulate in fp32, because sums over many tokens would lose precision or overflow in fp16.
    """
    torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def set_deterministic(deterministic: bool) -> None:
    """Allow all kernels, or only deterministic ones.

    If only deterministic kernels are allowed, torch raises an error for operations without one.
    """
    # `torch.use_deterministic_algorithms` does the same, but takes two seconds because it loads torch's compiler.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # The compiler reads this variable when it is loaded.
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = str(int(deterministic))
    compiler: Any = sys.modules.get("torch._inductor.config")
    # Older compilers lack this option and raise an error for unknown names.
    if hasattr(compiler, "deterministic"):
        compiler.deterministic = deterministic
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, False
    if deterministic:
        # cuBLAS reads this variable when it creates its first workspace.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

"""The registry of Triton kernels; kernels are tested on each device before they are used there.

A module of kernels has a function `try_out(device)`, or `try_out(device, dtype)` if the kernels are compiled for each
dtype. The function compares each kernel with torch's operations, and raises an error if a kernel fails or its results
are wrong.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from trainer.contract.errors import first_line
from trainer.runtime.out_of_memory import is_shortage

RETRY_S = 2.0
# All kernels, by module.
KERNELS: dict[str, Kernels] = {}
# Modules that `withhold` has disabled because another rank cannot use them.
_withheld: set[str] = set()
# The reasons why modules failed, by device and module.
_failures: dict[torch.device, dict[str, str]] = {}


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels in a module: their purpose, their number, and whether they are compiled for the matmul dtype.

    `n` is the number of kernels, including variants, that Triton compiles to test the module for a 16-bit job. With
    `also_fp32`, kernels compiled for a dtype are also used in fp32. Each new instance is added to `KERNELS`.
    """

    module: str
    purpose: str
    n: int
    by_dtype: bool = False
    also_fp32: bool = False

    def __post_init__(self) -> None:
        KERNELS[self.module] = self

    def on(self, tensor: Tensor, dtype: torch.dtype | None = None) -> ModuleType | None:
        """Return the module if its kernels work on the tensor's GPU, otherwise None.

        Kernels compiled for each dtype are tested for `dtype`, by default the tensor's dtype, and do not support
        float64.
        """
        dtypes = [dtype or tensor.dtype] if self.by_dtype else []
        return self.working(tensor.device, *dtypes) if tensor.is_cuda and torch.float64 not in dtypes else None

    def working(self, device: torch.device, *dtypes: torch.dtype) -> ModuleType | None:
        """Import the module and run its `try_out(device, *dtypes)`; warn and return None if this fails.

        Triton needs a C compiler and the Python headers, which may be missing. Older versions of Triton do not
        support bf16 on GPUs without bf16 hardware.
        """
        return None if self.is_withheld else _tried(self, device, *dtypes)

    @property
    def is_withheld(self) -> bool:
        """Whether the kernels have been disabled by `withhold`."""
        return self.module in _withheld

    def dtypes(self, dtype: torch.dtype) -> list[list[torch.dtype]]:
        """Return the dtype arguments for each call to `try_out` for matmuls in `dtype`."""
        others = [[torch.float32]] if self.also_fp32 and dtype != torch.float32 else []
        return [[dtype], *others] if self.by_dtype else [[]]


# Functions compiled by torch.compile; the module has no kernels.
COMPILED_UPDATES = Kernels("trainer.optimizers.compiled", "compiled updates", 0)
DEAD_LATENTS = Kernels(
    "trainer.saes.kernels.triton_dead_latents", "dead latents' weights", 6, by_dtype=True, also_fp32=True
)
ENCODER_INPUTS = Kernels("trainer.saes.kernels.triton_encode", "encoder inputs", 1, by_dtype=True)
GRADIENT_SCALES = Kernels("trainer.training.triton_scale", "gradient scales", 1)
LATENT_SELECTIONS = Kernels("trainer.saes.kernels.triton_top_k", "latent selections", 11)
METRIC_SUMS = Kernels("trainer.metrics.triton_interval", "metric sums", 1)
OPTIMIZER_STEPS = Kernels("trainer.optimizers.triton_update", "optimizer steps", 4)
RECONSTRUCTION_ERRORS = Kernels("trainer.saes.kernels.triton_errors", "reconstruction errors", 5)
SELECTIONS_ACROSS_RANKS = Kernels("trainer.saes.kernels.triton_entries", "selections across ranks", 1)
SPARSE_PRODUCTS = Kernels("trainer.saes.kernels.triton_sparse", "sparse matmuls", 10, by_dtype=True)
TOKENS_SINCE_FIRED = Kernels("trainer.saes.kernels.triton_since_fired", "tokens since fired", 3)


def n_kernels() -> int:
    """Return the number of kernels, including variants, that are compiled to test all modules for a 16-bit job."""
    return sum(one.n for one in KERNELS.values())


@functools.cache
def _tried(kernels: Kernels, device: torch.device, *dtypes: torch.dtype) -> ModuleType | None:
    try:
        module = importlib.import_module(kernels.module)
        _try_out(module, device, *dtypes)
    except Exception as error:
        if is_shortage(error):
            # Running out of memory does not mean that Triton fails, and smaller micro-batches may help.
            raise
        _failures.setdefault(device, {})[kernels.module] = first_line(error)
        of_dtypes = "".join(f" in {str(one).removeprefix('torch.')}" for one in dtypes)
        slower = f"{kernels.purpose}{of_dtypes} on {device} run without Triton, which is slower"
        warnings.warn(f"{slower}: {error}", stacklevel=3)
        return None
    return module


def _try_out(module: ModuleType, device: torch.device, *dtypes: torch.dtype) -> None:
    """Test the kernels; retry once after an OSError, because another process may just have replaced a file."""
    try:
        module.try_out(device, *dtypes)
    except OSError:
        time.sleep(RETRY_S)
        module.try_out(device, *dtypes)


def try_all(device: torch.device, dtype: torch.dtype, kernels: Iterable[Kernels]) -> dict[str, str]:
    """Compile and test the given kernels; return a dict mapping each module that failed on the device to the reason.

    The dict includes failures from earlier tests.
    """
    for one in kernels:
        for dtypes in one.dtypes(dtype):
            one.working(device, *dtypes)
    return _failures.get(device, {})


def report_compiling(begin: Callable[[int], object]) -> None:
    """Call `begin` with 1, 2, … whenever Triton is about to compile a kernel or load a compiled kernel.

    Do nothing if Triton is not installed.
    """
    with contextlib.suppress(ImportError, AttributeError):
        settings, name = _hook_of_triton()
        before, numbers = getattr(settings, name), itertools.count(1)

        def hook(*arguments: Any, **named: Any) -> Any:
            begin(next(numbers))
            # The hook's result decides whether Triton compiles the kernel.
            return before(*arguments, **named) if before else None

        setattr(settings, name, hook)


def _hook_of_triton() -> tuple[Any, str]:
    """Return the object and attribute name of the hook that Triton calls before it compiles a kernel."""
    try:
        from triton import knobs
    except ImportError:  # before Triton 3.4, which comes with PyTorch 2.8
        from triton.runtime.jit import JITFunction

        return JITFunction, "cache_hook"
    return knobs.runtime, "jit_cache_hook"


def withhold(names: Iterable[str]) -> None:
    """Disable the given modules, even if they work on this rank."""
    _withheld.update(names)


def forget() -> None:
    """Forget all test results, and enable all modules."""
    _tried.cache_clear()
    _withheld.clear()
    _failures.clear()

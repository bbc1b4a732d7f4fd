"""Checks whether Triton kernels work on a device before they are used."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import time
import warnings
from collections.abc import Callable, Collection, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from trainer.contract.errors import first_line
from trainer.runtime.out_of_memory import is_shortage

RETRY_S = 2.0
# The number of kernels, including variants, that `try_out` compiles in all modules except COMPILED_UPDATES.
N_KERNELS = 43
# The module that calls torch.compile.
COMPILED_UPDATES = "trainer.optimizers.compiled"


class Kernels(NamedTuple):
    """The purpose of a module's kernels, and whether they are compiled for the dtype of products and also for fp32."""

    purpose: str
    by_dtype: bool = False
    also_fp32: bool = False

    def dtypes(self, dtype: torch.dtype) -> list[list[torch.dtype]]:
        """Return the dtype arguments of each call of `try_out` for products in `dtype`."""
        others = [[torch.float32]] if self.also_fp32 and dtype != torch.float32 else []
        return [[dtype], *others] if self.by_dtype else [[]]


MODULES = {
    COMPILED_UPDATES: Kernels("compiled updates"),
    "trainer.metrics.triton_interval": Kernels("metric sums"),
    "trainer.optimizers.triton_update": Kernels("optimizer steps"),
    "trainer.saes.kernels.triton_dead_latents": Kernels("dead latents' weights", by_dtype=True, also_fp32=True),
    "trainer.saes.kernels.triton_encode": Kernels("encoder inputs", by_dtype=True),
    "trainer.saes.kernels.triton_entries": Kernels("selections across ranks"),
    "trainer.saes.kernels.triton_errors": Kernels("reconstruction errors"),
    "trainer.saes.kernels.triton_since_fired": Kernels("tokens since fired"),
    "trainer.saes.kernels.triton_sparse": Kernels("sparse products", by_dtype=True),
    "trainer.saes.kernels.triton_top_k": Kernels("latent selections"),
    "trainer.training.triton_scale": Kernels("gradient scales"),
}
# Modules disabled by `withhold`, since another rank cannot use them.
_withheld: set[str] = set()
# Why modules failed, by device and module.
_failures: dict[torch.device, dict[str, str]] = {}


def working_kernels(name: str, device: torch.device, *dtypes: torch.dtype) -> ModuleType | None:
    """Import a module of `MODULES` and run its `try_out(device, *dtypes)`; warn and return None if either fails.

    Triton needs a C compiler and the Python headers, and a machine may lack either. Older versions of Triton do not
    support bf16 on GPUs without bf16 hardware.
    """
    return None if name in _withheld else _tried(name, device, *dtypes)


@functools.cache
def _tried(name: str, device: torch.device, *dtypes: torch.dtype) -> ModuleType | None:
    try:
        module = importlib.import_module(name)
        _try_out(module, device, *dtypes)
    except Exception as error:
        if is_shortage(error):
            # The shortage says nothing about Triton, and smaller micro-batches may solve it.
            raise
        _failures.setdefault(device, {})[name] = first_line(error)
        of_dtypes = "".join(f" in {str(one).removeprefix('torch.')}" for one in dtypes)
        purpose = f"{MODULES[name].purpose}{of_dtypes}"
        warnings.warn(f"{purpose} on {device} run without Triton, slower: {error}", stacklevel=3)
        return None
    return module


def _try_out(module: ModuleType, device: torch.device, *dtypes: torch.dtype) -> None:
    """Try the kernels; retry once after an OSError, since another process may have replaced a file while compiling."""
    try:
        module.try_out(device, *dtypes)
    except OSError:
        time.sleep(RETRY_S)
        module.try_out(device, *dtypes)


def try_all(device: torch.device, dtype: torch.dtype, names: Collection[str]) -> dict[str, str]:
    """Compile and try the kernels of these modules; return the reasons of all failures on this device, by module."""
    for name in names:
        for dtypes in MODULES[name].dtypes(dtype):
            working_kernels(name, device, *dtypes)
    return _failures.get(device, {})


def report_compiling(begin: Callable[[int], object]) -> None:
    """Call `begin` with 1, 2, … whenever Triton is about to compile a kernel or to load a compiled one.

    Do nothing without Triton.
    """
    with contextlib.suppress(ImportError, AttributeError):
        settings, name = _hook_of_triton()
        before, numbers = getattr(settings, name), itertools.count(1)

        def hook(*arguments: Any, **named: Any) -> Any:
            begin(next(numbers))
            # The result of the hook decides whether Triton compiles the kernel.
            return before(*arguments, **named) if before else None

        setattr(settings, name, hook)


def _hook_of_triton() -> tuple[Any, str]:
    """Return the object and attribute name of the hook that Triton calls before it compiles a kernel."""
    try:
        from triton import knobs
    except ImportError:  # before Triton 3.4, which PyTorch 2.8 brings
        from triton.runtime.jit import JITFunction

        return JITFunction, "cache_hook"
    return knobs.runtime, "jit_cache_hook"


def withhold(names: Iterable[str]) -> None:
    """Disable these modules, although they may work on this rank."""
    _withheld.update(names)


def is_withheld(name: str) -> bool:
    """Return whether a module is disabled by `withhold`."""
    return name in _withheld


def forget() -> None:
    """Forget the results of all trials, and enable all modules."""
    _tried.cache_clear()
    _withheld.clear()
    _failures.clear()

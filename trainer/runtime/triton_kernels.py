"""Finds out whether kernels in Triton work on a device, before anything relies on them."""

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
# How many kernels the trials of all modules but COMPILED_UPDATES compile, each variant counted.
N_KERNELS = 43
# The module that calls torch.compile.
COMPILED_UPDATES = "trainer.optimizers.compiled"


class Kernels(NamedTuple):
    """What a module's kernels compute, and whether they are compiled for a type of values, and for fp32 as well."""

    purpose: str
    by_dtype: bool = False
    also_fp32: bool = False

    def dtypes(self, dtype: torch.dtype) -> list[list[torch.dtype]]:
        """Return the types for each trial where products are in `dtype`."""
        others = [[torch.float32]] if self.also_fp32 and dtype != torch.float32 else []
        return [[dtype], *others] if self.by_dtype else [[]]


MODULES = {
    COMPILED_UPDATES: Kernels("compiled updates"),
    "trainer.metrics.triton_interval": Kernels("sums of metrics"),
    "trainer.optimizers.triton_update": Kernels("the optimizer's steps"),
    "trainer.saes.kernels.triton_dead_latents": Kernels("weights of dead latents", by_dtype=True, also_fp32=True),
    "trainer.saes.kernels.triton_encode": Kernels("what encoders read", by_dtype=True),
    "trainer.saes.kernels.triton_entries": Kernels("choices of several ranks"),
    "trainer.saes.kernels.triton_errors": Kernels("errors of reconstructions"),
    "trainer.saes.kernels.triton_silence": Kernels("counts of silent latents"),
    "trainer.saes.kernels.triton_sparse": Kernels("sparse products", by_dtype=True),
    "trainer.saes.kernels.triton_top_k": Kernels("choices of latents"),
    "trainer.training.triton_scale": Kernels("scales of gradients"),
}
# Modules that another rank cannot use, so that this one does not either.
_withheld: set[str] = set()
# By device: why a module could not be used there.
_failures: dict[torch.device, dict[str, str]] = {}


def working_kernels(name: str, device: torch.device, *dtypes: torch.dtype) -> ModuleType | None:
    """Import a module of `MODULES` and run its `try_out(device, *dtypes)`; warn and return None where either fails.

    Triton compiles with the C compiler and the Python headers of the machine, either of which may be missing; and its
    older versions know no bf16 on GPUs that have none.
    """
    return None if name in _withheld else _tried(name, device, *dtypes)


@functools.cache
def _tried(name: str, device: torch.device, *dtypes: torch.dtype) -> ModuleType | None:
    try:
        module = importlib.import_module(name)
        _try_out(module, device, *dtypes)
    except Exception as error:
        if is_shortage(error):
            # It says nothing of Triton, and is over once a batch is cut.
            raise
        _failures.setdefault(device, {})[name] = first_line(error)
        of_dtypes = "".join(f" in {str(one).removeprefix('torch.')}" for one in dtypes)
        purpose = f"{MODULES[name].purpose}{of_dtypes}"
        warnings.warn(f"{purpose} on {device} go without Triton, slower: {error}", stacklevel=3)
        return None
    return module


def _try_out(module: ModuleType, device: torch.device, *dtypes: torch.dtype) -> None:
    """Try the kernels, twice if need be: another process that compiles them may just have replaced a file."""
    try:
        module.try_out(device, *dtypes)
    except OSError:
        time.sleep(RETRY_S)
        module.try_out(device, *dtypes)


def try_all(device: torch.device, dtype: torch.dtype, names: Collection[str]) -> dict[str, str]:
    """Compile and try the kernels of these modules; return, by module, why some do not work."""
    for name in names:
        for dtypes in MODULES[name].dtypes(dtype):
            working_kernels(name, device, *dtypes)
    return _failures.get(device, {})


def report_compiling(begin: Callable[[int], object]) -> None:
    """From now on call `begin` before Triton compiles a kernel or reads a compiled one, with its number from 1.

    Nothing is reported where Triton is missing.
    """
    with contextlib.suppress(ImportError, AttributeError):
        settings, name = _hook_of_triton()
        before, numbers = getattr(settings, name), itertools.count(1)

        def hook(*arguments: Any, **named: Any) -> Any:
            begin(next(numbers))
            # What it returns decides whether the kernel is compiled at all.
            return before(*arguments, **named) if before else None

        setattr(settings, name, hook)


def _hook_of_triton() -> tuple[Any, str]:
    """Return the object and the name of its attribute that Triton calls before it compiles a kernel."""
    try:
        from triton import knobs
    except ImportError:  # before Triton 3.4, which PyTorch 2.8 brings
        from triton.runtime.jit import JITFunction

        return JITFunction, "cache_hook"
    return knobs.runtime, "jit_cache_hook"


def withhold(names: Iterable[str]) -> None:
    """Use these modules no more, although they may work here."""
    _withheld.update(names)


def is_withheld(name: str) -> bool:
    """Tell whether a module is used no more."""
    return name in _withheld


def forget() -> None:
    """Forget every trial, and what is withheld."""
    _tried.cache_clear()
    _withheld.clear()
    _failures.clear()

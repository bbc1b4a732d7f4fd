"""Finds out whether kernels in Triton work on a device, before anything relies on them."""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import NamedTuple

import torch

from trainer.contract.errors import first_line
from trainer.runtime.out_of_memory import is_shortage

RETRY_S = 2.0


class Kernels(NamedTuple):
    """What the kernels of a module compute, and whether they are compiled for a type of values."""

    purpose: str
    by_dtype: bool = False


MODULES = {
    "trainer.metrics.triton_interval": Kernels("sums of metrics"),
    "trainer.optimizers.triton_update": Kernels("the optimizer's steps"),
    "trainer.saes.kernels.triton_dead_latents": Kernels("weights of dead latents", by_dtype=True),
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


def try_all(device: torch.device, dtype: torch.dtype, begin: Callable[[int, int], object]) -> dict[str, str]:
    """Compile and try the kernels of all modules; return, by module, why some do not work.

    `begin` gets the number of each module, from 1, and how many there are.
    """
    for number, (name, kernels) in enumerate(MODULES.items(), start=1):
        begin(number, len(MODULES))
        working_kernels(name, device, *([dtype] if kernels.by_dtype else []))
    return _failures.get(device, {})


def withhold(names: Iterable[str]) -> None:
    """Use these modules no more, although they may work here."""
    _withheld.update(names)


def forget() -> None:
    """Forget every trial, and what is withheld."""
    _tried.cache_clear()
    _withheld.clear()
    _failures.clear()

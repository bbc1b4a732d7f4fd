"""Finds out whether kernels in Triton work on a device, before anything relies on them."""

from __future__ import annotations

import functools
import importlib
import time
import warnings
from types import ModuleType

import torch

from trainer.runtime.out_of_memory import is_shortage

RETRY_S = 2.0


@functools.cache
def working_kernels(name: str, purpose: str, device: torch.device, *dtypes: torch.dtype) -> ModuleType | None:
    """Import the module `name` and run its `try_out(device, *dtypes)`; warn and return None where either fails.

    Triton compiles with the C compiler and the Python headers of the machine, either of which may be missing; and its
    older versions know no bf16 on cards that have none.
    """
    try:
        module = importlib.import_module(name)
        _try_out(module, device, *dtypes)
    except Exception as error:
        if is_shortage(error):
            # It says nothing of Triton, and is over once a batch is cut.
            raise
        of_dtypes = "".join(f" in {str(one).removeprefix('torch.')}" for one in dtypes)
        warnings.warn(f"{purpose}{of_dtypes} on {device} go without Triton, slower: {error}", stacklevel=2)
        return None
    return module


def _try_out(module: ModuleType, device: torch.device, *dtypes: torch.dtype) -> None:
    """Try the kernels, twice if need be: another process that compiles them may just have replaced a file."""
    try:
        module.try_out(device, *dtypes)
    except OSError:
        time.sleep(RETRY_S)
        module.try_out(device, *dtypes)

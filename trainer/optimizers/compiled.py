"""Compiles functions that run many elementwise operations on large tensors, to make fewer passes over memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from trainer.contract.errors import first_line
from trainer.runtime.triton_kernels import COMPILED_UPDATES

# The number of values below which a pass takes less time than its kernel launch.
_SMALL = 2**16


class Compiled:
    """A function compiled by torch.compile if its first argument is large and on a GPU.

    On CPU, the function runs uncompiled, since separate operations on tiles that fit into the cache are just as fast.
    The function also runs uncompiled if compilation fails, for example because there is no C compiler. Nothing is
    compiled before the first call.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._compiled: Callable[..., None] | None = None

    def __call__(self, first: Tensor, *others: object) -> None:
        if not first.is_cuda or first.numel() < _SMALL:
            self._function(first, *others)
            return
        if self._compiled is None:
            # If only some replicas compiled this function, their results would be rounded differently.
            withheld = COMPILED_UPDATES.is_withheld
            self._compiled = self._function if withheld else torch.compile(self._function, dynamic=True)
        try:
            self._compiled(first, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Triton, its compiler and the driver raise many types of exceptions
            warnings.warn(f"the optimizer runs uncompiled, which is slower: {first_line(error)}", stacklevel=2)
            self._compiled = self._function
            self._function(first, *others)


def try_out(device: torch.device) -> None:
    """Compile a function and run it once.

    Let errors from torch.compile propagate, and raise `RuntimeError` if the results are wrong.
    """
    values = torch.ones(_SMALL, device=device)
    torch.compile(_double, dynamic=True)(values)
    if not (values == 2).all():
        raise RuntimeError("the compiled function gives wrong results")


def _double(values: Tensor) -> None:
    values.mul_(2)

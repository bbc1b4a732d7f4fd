"""Replaces a CUDA graph on a CPU: repeats operations and kernels on the same memory without running the Python code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction

# Operations that only allocate memory.
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class TapeOnCpu(TorchDispatchMode):
    """Captures operations.

    Unlike a CUDA graph, a tape also executes them during the capture, so the first replay does nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Callable[[], None]] = []
        self._is_done = False

    def record(self, work: Callable[[], None]) -> None:
        with self, mock.patch.object(InterpretedFunction, "__getitem__", lambda *where: self._launcher(*where)):
            work()
        self._is_done = True

    def replay(self) -> None:
        if self._is_done:
            self._is_done = False
            return
        with torch.no_grad():
            for entry in self.entries:
                entry()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, named = func._schema.name.split("::")[1], kwargs or {}
        if name == "_local_scalar_dense":
            raise RuntimeError("the host waits for a number")
        result = func(*args, **named)
        if name not in _EMPTY:
            self.entries.append(lambda: _again(func, args, named, result))
        return result

    def _launcher(self, kernel: Any, grid: Any) -> Any:
        def launch(*args: Any, **named: Any) -> None:
            def run() -> None:
                with _disable_current_modes():
                    kernel.run(*args, grid=grid, warmup=False, **named)

            self.entries.append(run)
            run()

        return launch


def _again(func: Any, args: Any, named: dict[str, Any], result: Any) -> None:
    found = func(*args, **named)
    for before, now in zip(tree_leaves(result), tree_leaves(found), strict=True):
        # A view, or a tensor changed in place, uses the same memory as before and needs no copy.
        if isinstance(before, Tensor) and before.data_ptr() != now.data_ptr():
            before.copy_(now)

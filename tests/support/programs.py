"""Chooses which programs in a kernel launch Triton's interpreter runs, and in which order.

By default, the interpreter runs all programs in order. A GPU runs the programs in any order.
`support.interpreted` makes pytest load this module.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from triton import language
from triton.runtime import interpreter

Program = tuple[int, ...]
# The Triton language modules that the interpreter has replaced in this process, which compiles no kernels.
_PREPARED: set[frozenset[str]] = set()


class Programs:
    """Runs the programs in each launch in random order; with `only_last`, only the last programs along the first axis.

    Grids with the same size get the same order until `seed` changes. A repeated computation is therefore bit-identical
    even if several programs add to the same element.
    """

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self.only_last = False

    def of(self, grid: Program) -> list[Program]:
        """Return the indices of the selected programs in a launch, in execution order."""
        size, *others = map(range, grid)
        chosen = list(itertools.product(size[-1:] if self.only_last else size, *others))
        random.Random(f"{self.seed} {grid}").shuffle(chosen)
        return chosen

    def assert_same_bits(self, make: Callable[[], Iterable[Tensor]]) -> None:
        """Assert that the result of `make` does not depend on the order of programs."""
        expected = list(make())
        self.seed += " again"
        assert all(torch.equal(found, one) for found, one in zip(make(), expected, strict=True))


@pytest.fixture(autouse=True)
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    """Run the programs in a different random order for each test."""
    chosen = Programs(request.node.nodeid)
    choose, set_size = interpreter.interpreter_builder.set_grid_idx, interpreter.interpreter_builder.set_grid_dim
    prepare = interpreter._patch_lang

    class Launch(interpreter.GridExecutor):  # type: ignore[misc]
        def __init__(self, kernel: Any, names: Any, grid: Program, *others: Any) -> None:
            self.whole = (*grid, 1, 1)[:3]
            self.chosen = chosen.of(self.whole)
            super().__init__(kernel, names, (len(self.chosen),), *others)

        def __call__(self, *args: Any, **named: Any) -> None:
            with (
                mock.patch.multiple(
                    interpreter.interpreter_builder,
                    set_grid_dim=lambda *_: set_size(*self.whole),
                    set_grid_idx=lambda number, *_: choose(*self.chosen[number]),
                ),
                mock.patch.object(interpreter, "_patch_lang", self.prepare),
            ):
                super().__call__(*args, **named)

        def prepare(self, function: Any) -> Any:
            """Replace a kernel's language modules only once, not for each launch and each called function."""
            known = _known_of_language(function)
            if known not in _PREPARED:
                _PREPARED.add(known)
                scope = prepare(function)
                if scope is not None:
                    # Without this, each launch would restore the modules when it ends.
                    scope._changes.clear()
                # Triton 3.2 calls `int` on a one-element array, which NumPy 2.4 rejects.
                language.tensor.__index__ = lambda tensor: int(tensor.handle.data.item())
            return SimpleNamespace(restore=lambda: None)

    with mock.patch.object(interpreter, "GridExecutor", Launch):
        yield chosen


@functools.cache
def _known_of_language(function: Any) -> frozenset[str]:
    modules = (language, language.core)
    return frozenset(one.__name__ for one in modules if any(one is value for value in function.__globals__.values()))


class _Mask(language.tensor):  # type: ignore[misc]
    """A mask that is applied even if its only element is false."""

    def __bool__(self) -> bool:
        return True


def _mend_triton_3_2() -> None:
    """Correct three bugs in Triton 3.2's interpreter.

    The interpreter has no boolean type, ignores a mask whose only element is false, and stores sums in int32 memory
    although NumPy computes them in int64.
    """
    builder, store = interpreter.InterpreterBuilder, language.semantic._store_legacy
    store_numbers = builder.create_masked_store

    def masked_store(pointer: Any, value: Any, mask: Any, *others: Any) -> Any:
        return store(pointer, value, mask if mask is None else _Mask(mask.handle, mask.type), *others)

    def typed_store(self: Any, places: Any, value: Any, *others: Any) -> Any:
        dtype = places.get_element_ty()
        numbers = value.data.astype(interpreter._get_np_dtype(dtype))
        return store_numbers(self, places, interpreter.TensorHandle(numbers, dtype), *others)

    builder.get_int1_ty, builder.create_masked_store = lambda _: language.int1, typed_store
    language.semantic._store_legacy = masked_store


def _remember_dtypes() -> None:
    """Cache the NumPy dtype of each Triton type. Without the cache, every operation would create a dictionary."""
    dtype_of = functools.cache(interpreter._get_np_dtype)

    def of_scalar(dtype: Any) -> Any:
        scalar = dtype.scalar
        return dtype_of(language.uint64 if scalar.is_ptr() else scalar)

    interpreter._get_np_dtype = of_scalar


_remember_dtypes()
if not hasattr(interpreter.InterpreterBuilder, "get_int1_ty"):
    _mend_triton_3_2()

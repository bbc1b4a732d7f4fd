"""Replaces Triton kernels in tests, on any device."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from trainer.runtime.triton_kernels import COMPILED_UPDATES, KERNELS, Kernels

NO_KERNELS: dict[Kernels, Any] = dict.fromkeys(KERNELS.values())


@contextlib.contextmanager
def use_kernels(given: Mapping[Kernels, Any]) -> Iterator[None]:
    """Within the context, use these modules or mocks as kernels, even for tensors on a CPU; None means no kernels.

    All other kernels remain unchanged.
    """
    on = Kernels.on

    def given_or_tried(kernels: Kernels, tensor: Tensor, dtype: torch.dtype | None = None) -> Any:
        return given[kernels] if kernels in given else on(kernels, tensor, dtype)

    with mock.patch.object(Kernels, "on", given_or_tried):
        yield


def all_kernels() -> dict[Kernels, Any]:
    """Return all modules of Triton kernels, without running their self-tests."""
    return {one: importlib.import_module(one.module) for one in KERNELS.values() if one != COMPILED_UPDATES}

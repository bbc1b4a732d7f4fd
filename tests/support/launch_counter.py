"""A Triton driver for a nonexistent GPU: kernels can be compiled for it, but not launched."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget


class NoGpu:
    """The subset of Triton's driver interface that is used before kernels are compiled."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the driver has no {name} without a GPU")

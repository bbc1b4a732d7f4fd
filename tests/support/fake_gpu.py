"""Runs the GPU path of a step on fake tensors (without memory), to test shapes, types and operations without a driver.

With a CPU build of torch, the tensors report the device "cpu" and only `is_cuda` is true, because autograd needs a
driver for "cuda" tensors. With a CUDA build and the stubs of `tests/fake_cuda`, the tensors report "cuda:0", so that a
tensor left on the CPU is detected. Code that reads a tensor's values gets arbitrary numbers.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainer.contract.planning import first_look
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.settings.optimizers import AdamSettings
from trainer.optimizers import tiled
from trainer.parallel.base import Parallel
from trainer.parallel.group import Group, local_shard, wide_dtype
from trainer.saes.kernels import buffer_sizer, reused_buffer

CPU = torch.device("cpu")
# Set by `make test-fake-cuda`.
SAYS_CUDA = bool(os.environ.get("FAKE_CUDA"))
DEVICE = torch.device("cuda", 0) if SAYS_CUDA else CPU


class OtherInterpreter(Group):
    """A group of ranks whose collectives return uninitialised tensors of the correct shape."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty(self.size, *tensor.shape)

    def part_of_sum(self, tensor: Tensor) -> Tensor:
        own = local_shard(tensor, self)
        parts = self.gather(own) if (dtype := wide_dtype(tensor)) != tensor.dtype else None
        total = torch.empty_like(own, dtype=dtype)
        del parts
        return total

    def to_owners(self, tensor: Tensor) -> Tensor:
        return self.gather(local_shard(tensor, self))

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        return tensor.new_empty(n_rows, *tensor.shape[2:])


class Unread:
    """Replaces the reader of stop requests and reports no requests.

    The real reader returns the requests from the previous step.
    """

    def read(self, total: Tensor) -> tuple[bool, ...]:
        return (False,) * len(total)


def one_of_ranks(
    n_data: int, n_latents: int, group: Callable[[str, int], Group] = lambda _, size: OtherInterpreter(size)
) -> tuple[Parallel, dict[str, Any]]:
    """Return one rank in a data-parallel, tensor-parallel or hybrid run, and its job's `parallel` settings.

    `group` is a function that creates a group, given its name and size.
    """
    n_ranks = n_data * n_latents
    world = group("world", n_ranks) if n_ranks > 1 else None
    data, latents = (
        world if size == n_ranks else group(name, size) if size > 1 else None
        for name, size in (("data", n_data), ("latents", n_latents))
    )
    ranks = Parallel(DEVICE, data=data, latents=latents, world=world)
    ranks.__dict__["_requests"] = Unread()
    if n_data > 1 and n_latents > 1:
        return ranks, {"mode": "hybrid", "latent_ranks": n_latents}
    return ranks, {"mode": "ddp" if n_data > 1 else "tensor" if n_latents > 1 else "single"}


class ToldNumber:
    """Replaces `HostCopy`, a number that the host reads from the GPU.

    By default, the number exceeds the capacity of every buffer.
    """

    told = 2**62

    def __init__(self, number: Tensor) -> None:
        number.clone()

    def read(self) -> int:
        return self.told


@contextlib.contextmanager
def fake_gpu(above: int | None = None) -> Iterator[None]:
    """Within the context, make all tensors created on `DEVICE` behave like GPU tensors.

    `above` is the number of pre-activations per batch that exceed the threshold of an SAE with a sparsity penalty. The
    default exceeds every limit, so only dense matmuls are used.
    """
    with contextlib.ExitStack() as stack:
        if above is not None:
            stack.enter_context(mock.patch.object(ToldNumber, "told", above))
        for target, name, value in (*_ALWAYS, *(_WITH_CUDA if SAYS_CUDA else _WITHOUT)):
            stack.enter_context(mock.patch.object(target, name, value))
        if SAYS_CUDA:
            torch._C._ensureCUDADeviceGuardSet()
            ctypes.CDLL(None).fake_cuda_on()
        else:
            stack.enter_context(mock.patch.dict(tiled._TILE, {"cpu": tiled._TILE["cuda"]}))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _anywhere(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _half_of_them(mask: Tensor, *, as_tuple: bool = False) -> Any:
    """Select half of the candidates, because the real selection depends on values, which fake tensors do not have."""
    places = torch.empty(mask.numel() // 2, mask.dim(), dtype=torch.int64, device=mask.device)
    return places.unbind(1) if as_tuple else places


def _moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Recreate a module's tensors on the target device, because fake parameters cannot be moved to another device."""
    for part in module.modules():
        for name, one in part._parameters.items():
            part._parameters[name] = one if one is None else nn.Parameter(_like(one, device))
        for name, buffer in part._buffers.items():
            part._buffers[name] = buffer if buffer is None else _like(buffer, device)
    return module


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


_state_dtype = AdamSettings.state_dtype


def _state_dtype_on_gpus(settings: AdamSettings, _device: str) -> str:
    return _state_dtype(settings, "cuda")


def _from_host(*args: Any, device: Any = None, **others: Any) -> Tensor:
    """Create a tensor from numbers on the host.

    The device tensor is filled with ones, because a copy would need a driver.
    """
    made = _TENSOR(*args, **others)
    return made if device is None else torch.full(tuple(made.shape), 1, dtype=made.dtype, device=device)


def _yes(*_: Any) -> bool:
    return True


def _no(*_: Any) -> bool:
    return False


def _nothing(*_: Any) -> None:
    return None


_TENSOR = torch.tensor
_ALWAYS = (
    (FakeTensor, "nonzero", _half_of_them),
    (FakeTensor, "__bool__", _no),
    (AdamSettings, "state_dtype", _state_dtype_on_gpus),
    (torch.cuda, "device_of", _anywhere),
    # A GPU's allocator reuses the memory of a product. A mock would keep a reference to the product and prevent this.
    (reused_buffer, "put_back", _nothing),
    (first_look, "costs", lambda: None),
    (buffer_sizer, "HostCopy", ToldNumber),
)
_WITHOUT = ((FakeTensor, "is_cuda", True), (nn.Module, "to", lambda self, *args: self))
_WITH_CUDA = (
    (fake_tensor, "init_gpu_context", _nothing),
    (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
    (torch.cuda, "is_bf16_supported", _yes),
    (torch.cuda, "is_current_stream_capturing", _no),
    (torch.cuda, "synchronize", _nothing),
    (torch, "tensor", _from_host),
    (nn.Module, "to", _moved),
)


def job_of(sae: dict[str, Any], train: dict[str, Any], parallel: dict[str, Any] | None = None) -> JobConfig:
    """Return a job with these settings and defaults for all others."""
    table = {"data": {"path": "x"}, "sae": sae, "train": {"n_steps": 1000} | train, "parallel": parallel or {}}
    job, problems = parse_job(table)
    assert job is not None, problems
    return job

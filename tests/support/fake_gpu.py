"""The path that a step takes on a GPU, on tensors without memory: shapes, types and operations without a driver.

With a build of torch for CPUs the tensors say "cpu" and only `is_cuda` is true, since autograd asks for a driver where
they say "cuda". What asks a tensor for its numbers gets made-up ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from trainer.contract.planning import first_look
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.optimizers import tiled
from trainer.parallel.group import Group, own_part
from trainer.saes.kernels import reused_buffer

CPU = torch.device("cpu")


class Elsewhere(Group):
    """A group of ranks that answers with tensors of the right size and nothing in them."""

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.new_empty(self.size, *tensor.shape)

    def to_owners(self, tensor: Tensor) -> Tensor:
        return self.gather(own_part(tensor, self))

    def from_owners(self, tensor: Tensor, n_rows: int) -> Tensor:
        return tensor.new_empty(n_rows, *tensor.shape[2:])


@contextlib.contextmanager
def fake_gpu() -> Iterator[None]:
    """Let whatever is made within the context pass for a tensor on a GPU."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(FakeTensor, "is_cuda", True))
        enter(mock.patch.object(FakeTensor, "nonzero", _half_of_them))
        enter(mock.patch.object(FakeTensor, "__bool__", return_value=False))
        enter(mock.patch.object(torch.cuda, "device_of", _anywhere))
        # A GPU's allocator keeps the memory of a product by itself.
        enter(mock.patch.object(reused_buffer, "put_back", _let_go))
        enter(mock.patch.object(first_look, "multiplies_bf16", return_value=False))
        enter(mock.patch.dict(tiled._TILE, {"cpu": tiled._TILE["cuda"]}))
        # Fake parameters cannot be moved, and are where they should be.
        enter(mock.patch.object(nn.Module, "to", lambda self, *args: self))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _anywhere(tensor: Tensor) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _let_go(matrix: Tensor) -> None:
    """Keep no reference, as a mock would."""


def _half_of_them(mask: Tensor, *, as_tuple: bool = False) -> Any:
    """Choose half of the candidates, since how many are chosen depends on numbers, which fake tensors do not have."""
    places = torch.empty(mask.numel() // 2, mask.dim(), dtype=torch.int64)
    return places.unbind(1) if as_tuple else places


def job_of(sae: dict[str, Any], train: dict[str, Any], parallel: dict[str, Any] | None = None) -> JobConfig:
    """Return the job of these settings, with all others by default."""
    table = {"data": {"path": "x"}, "sae": sae, "train": {"n_steps": 1000} | train, "parallel": parallel or {}}
    job, problems = parse_job(table)
    assert job is not None, problems
    return job

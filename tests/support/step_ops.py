"""Records every operation in a GPU step: the tensors it reads and writes, and the line of code that calls it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from support.fake_gpu import DEVICE, ToldNumber, fake_gpu
from support.kernels import all_kernels, use_kernels
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from trainer.contract.planning.workload import Layout
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.saes.kernels import buffer_sizer, sparse
from trainer.training.learner import Learner

# Operations that launch no kernel.
_FREE = {
    "new_empty", "new_empty_strided", "empty", "empty_like", "empty_strided", "detach", "lift_fresh", "alias", "set_",
    "_record_function_enter_new", "_record_function_exit", "device", "_unsafe_view", "promote_types",
}  # fmt: skip
# The host waits for the results of these operations.
WAITS = {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal", "masked_select"}
_QUESTIONS = ("nonzero", "__bool__", "cpu", "numpy", "tolist")
# The host also waits for these operations, because they copy numbers from unpinned host memory.
_FROM_HOST = ("tensor", "as_tensor", "asarray")
WAITS |= {*_QUESTIONS, *_FROM_HOST, "new_tensor", "read"}
_TRAINER = f"{Path(sparse.__file__).parents[2]}/"


class Operand(NamedTuple):
    """A tensor that an operation reads or writes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes(self) -> int:
        """The number of bytes the tensor occupies in memory. Expanded dimensions are not counted."""
        n = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            n *= size if stride or size == 0 else 1
        return n * self.dtype.itemsize

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class Op:
    """A torch operation or a launch of a Triton kernel; `at` is the line in the trainer's code that calls it."""

    name: str
    reads: tuple[Operand, ...]
    writes: tuple[Operand, ...]
    at: str
    # For Triton kernels only: the kernel, the number of programs, and the arguments by name, with tensors as operands.
    kernel: Any = None
    grid: tuple[int, ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()

    @property
    def is_kernel(self) -> bool:
        return self.kernel is not None

    @property
    def is_mixed(self) -> bool:
        """Whether the operation's tensors are on different devices."""
        return len({one.device for one in (*self.reads, *self.writes)}) > 1

    @property
    def bytes(self) -> int:
        """The bytes read and written if each operand is moved once; with `some_rows`, only these rows are counted."""
        named = [dict(self.arguments).get(name) for name in ("some_rows", "more_rows")]
        if named[0] is None:
            return sum(one.bytes for one in (*self.reads, *self.writes))
        n = sum(one.numel for one in named if one is not None)
        return sum(one.bytes * n // max(one.shape[0], 1) for one in (*self.reads, *self.writes))

    def argument(self, name: str) -> Any:
        """Return a kernel argument."""
        return dict(self.arguments)[name]


@dataclass
class Exchange:
    """A collective of `kind` over `group`: the bytes that a rank sends, by type, and the calling function.

    The collective starts just before the operation with index `begins` in its step. Operations from index `ends` on
    wait for the collective; if `ends_later` is set, these are operations in the next step.
    """

    group: str
    kind: str
    sent: dict[torch.dtype, int]
    at: str
    begins: int
    ends: int | None = None
    ends_later: bool = False


@dataclass(frozen=True)
class Step:
    """The operations in a step: `passes` are the forward and backward passes and metrics, `update` the weight update.

    `exchanges` contains the collectives of groups that write to the step's log, in order.
    """

    passes: tuple[Op, ...]
    update: tuple[Op, ...]
    exchanges: tuple[Exchange, ...] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.passes + self.update

    @property
    def waits(self) -> list[str]:
        """The operations at which the host waits for the device."""
        return [f"{op.name} at {op.at}" for op in self.ops if op.name in WAITS]


class OpLog(TorchDispatchMode):
    """Records the torch operations that run and the kernels that would be launched."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.exchanges: list[Exchange] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name == "_local_scalar_dense":
            self.ops.append(Op(name, _operands(args), (), _place()))
            return 0.0 if args[0].is_floating_point() else 0
        # `_fused_adam_` has no result, and PyTorch 2.11 has no fake version of its variant with a learning rate tensor.
        result = None if name == "_fused_adam_" else func(*args, **(kwargs or {}))
        if name not in _FREE and not _is_view(func, result):
            self.ops.append(_op_of(func, name, (args, kwargs), result))
        return result

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """Record Triton kernels instead of launching them."""
        log = self.ops

        def launcher(kernel: Any, grid: Any) -> Any:
            return lambda *args, **named: log.append(_launch(kernel, grid, args, named))

        with mock.patch.object(KernelInterface, "__getitem__", launcher), use_kernels(all_kernels()):
            yield

    @contextlib.contextmanager
    def questions(self) -> Iterator[None]:
        """Within the context, record reads of a tensor's values that a fake tensor serves without an operation.

        Also record reads of numbers that the step copied to the host, and tensors that the host creates on a device
        from numbers.
        """

        def noted(name: str) -> Any:
            answer = getattr(FakeTensor, name)

            def ask(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                self.ops.append(Op(name, _operands(tensor), (), _place()))
                return False if name == "__bool__" else answer(tensor, *args, **kwargs)

            return ask

        def noted_copy(name: str) -> Any:
            make = getattr(torch, name)

            def copy(*args: Any, device: Any = None, **kwargs: Any) -> Any:
                if device is not None:
                    self.ops.append(Op(name, (), (), _place()))
                return make(*args, device=device, **kwargs)

            return copy

        with contextlib.ExitStack() as stack:
            for name in (*_QUESTIONS, "new_tensor"):
                stack.enter_context(mock.patch.object(FakeTensor, name, noted(name)))
            for name in _FROM_HOST:
                stack.enter_context(mock.patch.object(torch, name, noted_copy(name)))
            of_step: list[ToldNumber] = []
            stack.enter_context(mock.patch.object(buffer_sizer, "HostCopy", _noted_number(of_step, self.ops)))
            yield
            of_step.clear()


def recorded_step(
    job: JobConfig,
    d_in: int,
    *,
    dead: bool = False,
    dense: bool = False,
    parallel: Parallel | None = None,
    log: OpLog | None = None,
) -> Step:
    """Return the operations in a late step of a job on one GPU or, with `parallel`, on one of several ranks.

    The groups of `parallel` may write to `log`. With `dead`, the SAE may have dead latents. For an SAE with a sparsity
    penalty, assume that k latents per token exceed the threshold. With `dense`, more latents exceed the threshold, so
    only dense matmuls are used.
    """
    ranks, layout = parallel or Parallel(DEVICE), Layout(job, 1)
    n_tokens = layout.micro_batch
    above = job.sae.settings.n_active * n_tokens // ranks.latents.size
    with fake_gpu(None if dense else above):
        log = log or OpLog()
        with log.kernels():
            learner = Learner(job, d_in, None, ranks)
        x = torch.empty(n_tokens, d_in, device=DEVICE)
        for number in range(buffer_sizer.MEMORY + 1):
            if dead:
                learner.sae._longest_since_fired = 10**12
            under_way = [one for one in log.exchanges if one.ends is None]
            log.ops.clear()
            log.exchanges.clear()
            with log.kernels(), log.questions(), log:
                learner.begin_step(number)
                for left in reversed(range(layout.micro_batches)):
                    learner.accumulate(x, x, len(x) * ranks.data.size, is_last=not left)
                n_of_passes = len(log.ops)
                ranks.sum_step_([learner.tensors_to_exchange()], (False,))
                learner.update()
    for before, now in zip(under_way, (one for one in log.exchanges if one.ends is None), strict=True):
        now.ends, now.ends_later = before.ends, True
    return Step(tuple(log.ops[:n_of_passes]), tuple(log.ops[n_of_passes:]), tuple(log.exchanges))


def _noted_number(of_step: list[ToldNumber], log: list[Op]) -> type[ToldNumber]:
    class Number(ToldNumber):
        def __init__(self, number: Tensor) -> None:
            super().__init__(number)
            of_step.append(self)

        def read(self) -> int:
            if self in of_step:
                log.append(Op("read", (), (), _place()))
            return super().read()

    return Number


def _launch(kernel: Any, grid: Any, args: Any, named: dict[str, Any]) -> Op:
    called = dict(zip(kernel.arg_names, args, strict=False)) | named
    arguments = {name: _operand(one) if isinstance(one, Tensor) else one for name, one in called.items()}
    tensors = [(name, one) for name, one in arguments.items() if isinstance(one, Operand)]
    # The prefix of an argument's name shows whether the kernel writes the argument, or both reads and writes it.
    writes = tuple(one for name, one in tensors if name.startswith(("out", "inout")))
    reads = tuple(one for name, one in tensors if not name.startswith("out"))
    shape = tuple(map(int, grid(named) if callable(grid) else (grid if isinstance(grid, tuple) else (grid,))))
    return Op(kernel.__name__, reads, writes, _place(), kernel, shape, tuple(arguments.items()))


def _op_of(func: Any, name: str, arguments: Any, result: Any) -> Op:
    args, named = arguments
    # The operation writes an `out` argument but does not read it.
    reads = _operands((args, {key: one for key, one in (named or {}).items() if key != "out"}))
    writes = _operands(result)
    if func._schema.is_mutable:
        # An operation returns the tensors it changes in place. An operation that returns nothing changes its arguments.
        writes = writes or _mutated(func, arguments)
    return Op(name, reads, writes, _place())


def _mutated(func: Any, arguments: Any) -> tuple[Operand, ...]:
    args, kwargs = arguments
    named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | (kwargs or {})
    changed = [one.name for one in func._schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    return _operands([named.get(name) for name in changed])


def _is_view(func: Any, result: Any) -> bool:
    returns = func._schema.returns
    aliases = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
    return aliases and not func._schema.is_mutable and any(isinstance(one, Tensor) for one in tree_leaves(result))


def _operands(tree: Any) -> tuple[Operand, ...]:
    return tuple(_operand(one) for one in tree_leaves(tree) if isinstance(one, Tensor))


def _operand(tensor: Tensor) -> Operand:
    return Operand(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


def _place() -> str:
    """Return the innermost trainer line on the call stack, like "saes/topk.py:43"."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_TRAINER):
            return f"{name.removeprefix(_TRAINER)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch's autograd"

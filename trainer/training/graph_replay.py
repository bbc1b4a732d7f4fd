"""Records one SAE's steps on a single GPU as a CUDA graph and replays them: one launch instead of about 200.

On an H200 machine, the host took 6 to 8 ms for a step that keeps the GPU busy for 1.4 ms (d_in 768, 24,576 latents). A
replay repeats operations on the same memory, but runs no Python. Therefore, all state that outlives a step is updated
in place, and learning rates are tensors. The host-side decisions (the number of tokens, whether any latent may be dead,
the current k, the capacity for active latents) must be the same as during the capture; otherwise, the step is captured
again or runs eagerly.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from trainer.activations.outliers import Outliers
from trainer.contract.errors import first_line
from trainer.contract.planning import graph_capture
from trainer.contract.planning.workload import Layout
from trainer.contract.settings.job import JobConfig
from trainer.parallel.base import Parallel
from trainer.runtime.narrow_copy import kept_or_own
from trainer.runtime.precision import NARROW
from trainer.training.learner import Learner

# The number of consecutive eager steps with identical host-side decisions before a graph is captured. By then, the
# optimizer state and library workspaces are allocated, and k is not being annealed.
PLAIN_STEPS = 3
# A capture may fail for a temporary reason, such as another process briefly using the memory. A retry is worthwhile: an
# eager step may take four times as long as a replay, while a failed attempt costs only a few steps.
RETRY_STEPS, MOST_FAILURES = 500, 3


class Tape(Protocol):
    """Captures the operations launched on a device and replays them."""

    def record(self, work: Callable[[], None]) -> None:
        """Capture the operations of `work` without running them."""

    def replay(self) -> None:
        """Run the captured operations."""


class CudaTape:
    """A CUDA graph; its capture is thread-local, so that copies of batches in another thread do not break it."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def record(self, work: Callable[[], None]) -> None:
        stream, pool = torch.cuda.current_stream(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local"):
                work()
        except BaseException:
            torch.cuda.set_stream(stream)
            _end_allocations(stream.device_index, pool)
            raise

    def replay(self) -> None:
        self._graph.replay()


def _end_allocations(device_index: int, pool: tuple[int, int]) -> None:
    """Stop allocating from the graph's memory pool after a capture has failed.

    Otherwise, torch would return all memory freed later to the graph's pool, and batches would fill up the GPU's
    memory.
    """
    # PyTorch versions before 2.8 use the second name.
    names = ("_cuda_endAllocateToPool", "_cuda_endAllocateCurrentStreamToPool")
    end = next(getattr(torch._C, name) for name in names if hasattr(torch._C, name))
    # torch raises an error if allocation from the pool has already ended.
    with contextlib.suppress(RuntimeError):
        end(device_index, pool)
        torch._C._cuda_releasePool(device_index, pool)


class _Decided(NamedTuple):
    """The host-side decisions for a step; `of_pass` is None if capturing the step is not worthwhile."""

    shapes: tuple[Any, ...]
    of_all: int
    dead_after_tokens: int
    of_pass: Hashable | None


class _CapturedStep(NamedTuple):
    """A captured step, the input tensors for its batch, and the persistent tensors it updates."""

    tape: Tape
    x: Tensor
    y: Tensor
    lasting: list[Tensor]

    def copy_in(self, x: Tensor, y: Tensor) -> None:
        """Copy a batch into the input tensors for the next replay."""
        self.x.copy_(x)
        if y is not x:
            self.y.copy_(y)


class GraphReplay:
    """Takes steps for a learner with one micro-batch per step, either eagerly or by replaying a captured step.

    Outliers in the raw data are replaced within the step.
    """

    def __init__(
        self,
        learner: Learner,
        tape: Callable[[], Tape],
        outliers: Outliers | None = None,
        report: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._learner, self._new_tape, self._outliers, self._report = learner, tape, outliers, report
        self._decided: _Decided | None = None
        self._n_alike = self._n_captured = 0
        self._recording: _CapturedStep | None = None
        self._n_failed = 0
        # The number of replayed steps.
        self.n_replayed = 0

    def take(self, x: Tensor, y: Tensor, of_all: int) -> None:
        """Take a step on raw data; `y` is `x` except for a transcoder."""
        sae = self._learner.sae
        decided = _Decided(_shapes(x, y), of_all, sae.dead_after_tokens, sae.decide(len(x)))
        if decided != self._decided:
            self._decided, self._n_alike, self._recording = decided, 0, None
        self._n_alike += 1
        if self._may_record(decided):
            self._record(x, y, of_all)
        if self._recording is None:
            self._take_plainly(x, y, of_all)
        else:
            self._replay(self._recording, x, y)

    def _may_record(self, decided: _Decided) -> bool:
        if self._recording and not _are_same(self._recording.lasting, self._lasting()):
            # The tensors were replaced, for example when a checkpoint was loaded.
            self._recording, self._n_alike = None, 1
        # The more often the host-side decisions have changed, the more likely they are to change again.
        waits = PLAIN_STEPS * 2 ** min(self._n_captured, 8) + RETRY_STEPS * self._n_failed
        may = decided.of_pass is not None and self._n_failed < MOST_FAILURES
        return may and self._recording is None and self._n_alike > waits

    def _record(self, x: Tensor, y: Tensor, of_all: int) -> None:
        own_x = x.clone()
        own_y = own_x if y is x else y.clone()
        self._renew_copies()
        tape = self._new_tape()
        try:
            tape.record(lambda: self._take_plainly(own_x, own_y, of_all, counts=False))
        except Exception as error:
            self._n_failed += 1
            self._learner.drop_gradients()
            again = f"next attempt in {RETRY_STEPS} steps" if self._n_failed < MOST_FAILURES else "no more attempts"
            self._report(f"CUDA-graph capture failed on this GPU, so steps take longer ({again}): {first_line(error)}")
            return
        self._n_captured += 1
        self._recording = _CapturedStep(tape, own_x, own_y, self._lasting())

    def _take_plainly(self, x: Tensor, y: Tensor, of_all: int, *, counts: bool = True) -> None:
        if self._outliers:
            x, y = self._outliers.replace(x, y)
        self._learner.accumulate(x, y, of_all)
        self._learner.update(counts=counts)

    def _replay(self, recording: _CapturedStep, x: Tensor, y: Tensor) -> None:
        recording.copy_in(x, y)
        self._renew_copies()
        recording.tape.replay()
        self._learner.count_step()
        self.n_replayed += 1

    def _renew_copies(self) -> None:
        """Update the 16-bit copies of the weights if something other than a step has changed the weights."""
        if dtype := NARROW.get(self._learner.precision):
            for weights in (self._learner.sae.W_enc, self._learner.sae.W_dec):
                kept_or_own(weights, dtype)

    def _lasting(self) -> list[Tensor]:
        states = self._learner.optimizer.state.values()
        return [*(one for state in states for one in state.values()), *self._learner.interval.lasting()]


def replay_for(
    learner: Learner,
    job: JobConfig,
    parallel: Parallel,
    outliers: Outliers | None = None,
    report: Callable[[str], None] = warnings.warn,
) -> GraphReplay | None:
    """Return a `GraphReplay` for a learner if capturing its steps is possible and faster, otherwise None.

    `report` is called with a message when a capture fails.
    """
    sae, layout = learner.sae, Layout(job, parallel.world_size)
    may = parallel.device.type == "cuda" and learner.steps_by_rows
    pays = may and graph_capture.pays(layout, sae.d_in, sae.d_out, precision=learner.precision)
    return GraphReplay(learner, CudaTape, outliers, report) if pays else None


def _shapes(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x.shape, x.dtype, y is x, y.shape, y.dtype


def _are_same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return len(tensors) == len(others) and all(a is b for a, b in zip(tensors, others, strict=True))

"""A table of the data that GPU ranks read and exchange in a step, tracked in git so that changes are reviewed.

PYTHONPATH=tests python -m support.exchange_table > tests/trainer/exchange_of_a_step.csv

The numbers are recorded while `DistributedGroup` runs on fake tensors, which use no memory. `--times` prints modelled
times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from support.fake_gpu import job_of, one_of_ranks
from support.roofline import cost
from support.step_ops import Exchange, Op, OpLog, Step, recorded_step
from torch import Tensor

from trainer.activations.row_readers import Exchange as RowExchange
from trainer.activations.row_readers import own_rows
from trainer.contract.planning.hardware import assumed_speeds
from trainer.contract.planning.step_time import reads_parts
from trainer.contract.planning.workload import Workload
from trainer.contract.settings.sources import DataShape
from trainer.parallel import group as groups
from trainer.parallel.group import DistributedGroup, Group, Processes
from trainer.parallel.waiting import HostWaiting

# Shapes A and B from `tests/benchmarks/gpu_step.py`, with 4,096 tokens per rank.
SHAPES = {"A": ({"d_sae": 65536, "k": 64}, 2304), "B": ({"d_sae": 24576, "k": 32}, 768)}
TOKENS = 4096
CASES = ("no dead", "auxk")
COLUMNS = "mode,ranks,shape,case,asked for by,over,collective,type,times,MB that a rank sends (or reads)"
# The bytes/s that a GPU sends over NVLink, and the minimum seconds per collective.
LINK, LATENCY = 360e9, 15e-6
_TRAINER = f"{Path(groups.__file__).parents[1]}/"


class Mode(NamedTuple):
    """A parallel mode: how many ranks split the tokens, how many split the latents, and its settings."""

    name: str
    n_data: int
    n_latents: int
    settings: dict[str, Any] = {}

    @property
    def ranks(self) -> int:
        return self.n_data * self.n_latents


MODES = (
    *(Mode("ddp", n, 1) for n in (2, 4, 8)),
    Mode("ddp with bf16 gradients", 8, 1, {"gradients": "bf16"}),
    *(Mode("tensor", 1, n) for n in (2, 4, 8)),
    Mode("hybrid of 2", 2, 2),
    Mode("hybrid of 4", 2, 4),
)


class CountedRanks(DistributedGroup):
    """One rank of a group that logs its collectives instead of running them."""

    def __init__(self, name: str, size: int, log: OpLog) -> None:
        Processes.__init__(self, size, 0, HostWaiting())
        self._group: Any = self
        self.name, self._log = name, log
        self._together: Exchange | None = None

    def note(self, kind: str, tensor: Tensor, share: float, *, async_op: bool = False) -> _Transfer | None:
        """Log a collective in which each rank sends the fraction `share` of a tensor."""
        number = len(self._log.ops)
        one = self._together or Exchange(self.name, kind, {}, _asker(), number)
        one.sent[tensor.dtype] = one.sent.get(tensor.dtype, 0) + round(share * tensor.nbytes)
        if one is not self._together:
            self._log.exchanges.append(one)
            if not async_op:
                one.ends = number
        one.kind = kind
        return _Transfer(one, self._log) if async_op else None

    @contextlib.contextmanager
    def together(self, *, async_ops: bool) -> Iterator[_Transfer]:
        """Log all collectives within the context as a single collective."""
        self._together = Exchange(self.name, "", {}, _asker(), len(self._log.ops))
        try:
            yield _Transfer(self._together, self._log)
        finally:
            one, self._together = self._together, None
        self._log.exchanges.append(one)
        if not async_ops:
            one.ends = one.begins


class _Transfer(NamedTuple):
    exchange: Exchange
    log: OpLog

    def wait(self) -> None:
        if self.exchange.ends is None:
            self.exchange.ends = len(self.log.ops)


def _asker() -> str:
    """Return the innermost trainer function that calls a group, like "saes/topk.py TopK._score"."""
    frame = sys._getframe(1)
    while frame is not None:
        name, function = frame.f_code.co_filename, frame.f_code.co_qualname
        if name.startswith(_TRAINER) and (name != groups.__file__ or function.startswith("_PartSummed")):
            return f"{name.removeprefix(_TRAINER)} {function}"
        frame = frame.f_back  # type: ignore[assignment]
    return "torch's autograd"


@contextlib.contextmanager
def counted_collectives() -> Iterator[None]:
    """Within the context, make `torch.distributed`'s collectives only log how much data they would send."""

    def rest(group: CountedRanks) -> float:
        return (group.size - 1) / group.size

    def all_reduce(tensor: Tensor, *, group: CountedRanks, async_op: bool = False) -> Any:
        return group.note("sum", tensor, 2 * rest(group), async_op=async_op)

    def reduce_scatter(own: Tensor, whole: Tensor, *, group: CountedRanks, async_op: bool = False) -> Any:
        return group.note("sum of parts", whole, rest(group), async_op=async_op)

    def all_gather(whole: Tensor, own: Tensor, *, group: CountedRanks, async_op: bool = False) -> Any:
        return group.note("gather", own, group.size - 1, async_op=async_op)

    def all_to_all(received: Tensor, sent: Tensor, *_: Any, group: CountedRanks, async_op: bool = False) -> Any:
        return group.note("all to all", sent, rest(group), async_op=async_op)

    def broadcast(tensor: Tensor, *, group: CountedRanks, group_src: int) -> None:
        group.note("broadcast", tensor, 1)

    def coalescing(group: CountedRanks, device: Any = None, async_ops: bool = False) -> Any:
        return group.together(async_ops=async_ops)

    replaced = [(dist, "all_reduce", all_reduce), (dist, "all_to_all_single", all_to_all)]
    replaced += [(dist, "broadcast", broadcast), (groups, "_coalescing", coalescing)]
    replaced += [(groups, "_reduce_scatter", reduce_scatter), (groups, "_all_gather", all_gather)]
    with contextlib.ExitStack() as stack:
        for target, name, function in replaced:
            stack.enter_context(mock.patch.object(target, name, function))
        yield


def step_of(mode: Mode, shape: str, case: str) -> Step:
    """Return one rank's operations and collectives in a bf16 TopK step."""
    log = OpLog()
    ranks, settings = one_of_ranks(mode.n_data, mode.n_latents, lambda name, size: CountedRanks(name, size, log))
    ranks.sends_bf16 = mode.settings.get("gradients") == "bf16"
    sae, d_in = SHAPES[shape]
    train = {"precision": "bf16", "batch_size": TOKENS * mode.n_latents}
    job = job_of(sae | {"architecture": "topk"}, train, settings | mode.settings)
    with counted_collectives():
        step = recorded_step(job, d_in, dead=case == "auxk", parallel=ranks, log=log)
        rows = torch.empty(_rows_read(mode, shape), d_in, dtype=torch.bfloat16, device="meta")
        RowExchange((rows, rows), TOKENS * mode.n_latents, _readers(mode, shape, log))
    # Ranks exchange the rows of a batch during the previous step.
    of_rows = [dataclasses.replace(one, begins=0, ends=len(step.ops)) for one in log.exchanges[len(step.exchanges) :]]
    return dataclasses.replace(step, exchanges=(*of_rows, *step.exchanges))


def _readers(mode: Mode, shape: str, log: OpLog) -> Group:
    """Return a group whose ranks each read a share of the stored rows, on one host with H200s."""
    settings = {"mode": "hybrid", "latent_ranks": mode.n_latents} if mode.n_data > 1 else {"mode": "tensor"}
    sae, d_in = SHAPES[shape]
    train = {"precision": "bf16", "batch_size": TOKENS * mode.n_latents}
    job = job_of(sae | {"architecture": "topk"}, train, settings)
    work, speeds = Workload(job, mode.ranks, DataShape(d_in, None, None), "H200"), assumed_speeds("H200", "bf16")
    name = "world" if mode.n_data == 1 else "latents"
    return CountedRanks(name, mode.n_latents, log) if reads_parts(work, speeds, mode.ranks) else Group()


def _rows_read(mode: Mode, shape: str) -> int:
    """Return the number of stored rows that each rank reads for a step."""
    return len(own_rows(np.arange(TOKENS * mode.n_latents), _readers(mode, shape, OpLog())))


def rows(shapes: Iterable[str] = SHAPES) -> Iterator[str]:
    """Yield the lines of the CSV table, starting with the column names."""
    yield COLUMNS
    for mode in MODES:
        for shape in shapes:
            for case in CASES:
                # The numbers for all other combinations can be derived from the rows for these.
                if mode.ranks == 8 or shape == "A":
                    yield from rows_of(mode, shape, case)


def rows_of(mode: Mode, shape: str, case: str) -> Iterator[str]:
    """Yield the lines for one mode: one line per set of identical collectives, in order of first use.

    The first line describes what the rank reads from host memory.
    """
    read = round(2 * _rows_read(mode, shape) * SHAPES[shape][1] / 1e6, 3)
    of_read = ("activations/training_data.py IndexedData.read", "host", "read", "bfloat16", 1, read)
    yield ",".join(map(str, (mode.name, mode.ranks, shape, case, *of_read)))
    listed = [
        (one.at, one.group, one.kind, "+".join(str(dtype).removeprefix("torch.") for dtype in one.sent), _mb(one))
        for one in step_of(mode, shape, case).exchanges
    ]
    for (*words, megabytes), times in Counter(listed).items():
        yield ",".join(map(str, (mode.name, mode.ranks, shape, case, *words, times, megabytes)))


def _mb(one: Exchange) -> float:
    return round(sum(one.sent.values()) / 1e6, 3)


class Times(NamedTuple):
    """The seconds for a step, its computation and its transfers, and the bytes and collectives that a rank sends."""

    step_s: float
    computing_s: float
    transfers_s: float
    n_bytes: int
    n_exchanges: int


def times_of(step: Step, sharing: int) -> Times:
    """Simulate the times of a step: transfers run one at a time, and operations wait for transfers as in the trainer.

    The step is simulated twice, and the second result is used, because a step may wait for transfers from the previous
    step.
    """
    line, began = _TimeLine(), 0.0
    computing = [cost(_as_filled(op, sharing)).seconds for op in step.ops]
    for _ in range(2):
        began, line.later, line.ends_at = line.computed, line.ends_at, {}
        for number in range(len(step.ops) + 1):
            line.exchange(step, number)
            line.computed += sum(computing[number : number + 1])
    n_bytes = sum(sum(one.sent.values()) for one in step.exchanges)
    transfers = sum(map(_seconds, step.exchanges))
    return Times(line.computed - began, sum(computing), transfers, n_bytes, len(step.exchanges))


class _TimeLine:
    """The times in seconds at which a GPU finishes the added operations and transfers.

    `later` maps the index of each transfer in the previous step to its end time, because an operation in this step may
    wait for that transfer.
    """

    def __init__(self) -> None:
        self.computed = self.sent = 0.0
        self.ends_at: dict[int, float] = {}
        self.later: dict[int, float] = {}

    def exchange(self, step: Step, number: int) -> None:
        """Start the transfers that precede an operation, and wait for each transfer that the operation needs."""
        for at, one in enumerate(step.exchanges):
            if one.begins == number:
                self.sent = self.ends_at[at] = max(self.sent, self.computed) + _seconds(one)
            if one.ends == number:
                self.computed = max(self.computed, (self.later if one.ends_later else self.ends_at).get(at, 0.0))


def _seconds(one: Exchange) -> float:
    return LATENCY + sum(one.sent.values()) / LINK


def _as_filled(op: Op, sharing: int) -> Op:
    """Return the operation restricted to the valid entries, which are about this rank's share of all entries."""
    arguments = dict(op.arguments)
    if arguments.get("n_filled") is None:
        return op
    n_filled = math.ceil(arguments["n_entries"] / sharing)
    return dataclasses.replace(op, arguments=(*(arguments | {"n_entries": n_filled}).items(),))


def print_times() -> None:
    """Print a table of modelled times for all modes on 8 GPUs and for a single GPU."""
    print(
        "| mode | shape | case | step ms | computing | transfers | exposed | MB | collectives |",
        "|" + "---|" * 9,
        sep="\n",
    )
    for mode in (Mode("one GPU", 1, 1), *(mode for mode in MODES if mode.ranks == 8)):
        for shape in SHAPES:
            for case in CASES:
                one = times_of(step_of(mode, shape, case), mode.n_latents)
                ms = [1e3 * s for s in (one.step_s, one.computing_s, one.transfers_s, one.step_s - one.computing_s)]
                numbers = " | ".join(f"{number:.2f}" for number in ms)
                print(f"| {mode.name} | {shape} | {case} | {numbers} | {one.n_bytes / 1e6:.0f} | {one.n_exchanges} |")


if __name__ == "__main__":
    if "--times" in sys.argv:
        print_times()
    else:
        print(*rows(), sep="\n")

"""Rank processes that communicate over gloo, as on several machines, and log their collective calls."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from support.fake_gpu import job_of
from support.forked import loaded_context
from torch import Tensor

from trainer.activations.base import IndexedSource, Indices
from trainer.activations.batches import Batches
from trainer.activations.training_data import IndexedData
from trainer.contract.planning.workload import Layout
from trainer.parallel import group, process_group
from trainer.parallel.grid import Grid
from trainer.parallel.group import Group
from trainer.parallel.process_group import CPU, World, join
from trainer.parallel.shares import even, parse_shares
from trainer.training.learner import Learner
from trainer.training.step import cut_of, take_step

D_IN, N_STEPS = 12, 2
# The seconds after which a rank gives up if its peers make a different call or no call.
PATIENCE_S = 60
# Functions of `torch.distributed` that `trainer.parallel.group` imports by name.
BOUND = ("_reduce_scatter", "_all_gather")
_packs = group.packs


class Case(NamedTuple):
    """A training run on several ranks with these settings. With `path` "gpu", tensors report that they are on a GPU."""

    size: int
    path: str
    sae: dict[str, Any]
    parallel: dict[str, Any]
    train: dict[str, Any] = {}


class Call(NamedTuple):
    """A rank's call to a `torch.distributed` function: the ranks of its group, and the other arguments as text.

    If ranks exchange different numbers of rows, `sends` and `receives` are the numbers of rows sent to and received
    from each rank.
    """

    name: str
    members: tuple[int, ...]
    arguments: tuple[str, ...]
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()

    @property
    def of_all(self) -> tuple[Any, ...]:
        """The parts of the call that must be the same on all ranks of the group."""
        return self[:3]


def calls_of_ranks(cases: Sequence[Case], folder: Path) -> list[list[list[Call]]]:
    """Return the calls of each rank in each case, as [rank][case]; ranks connect through files in `folder`."""
    n_ranks = max(case.size for case in cases)
    with loaded_context().Pool(n_ranks) as pool:
        tasks = [(rank, cases, folder) for rank in range(n_ranks)]
        return pool.starmap_async(_calls_of_rank, tasks, chunksize=1).get(2 * PATIENCE_S)


def _calls_of_rank(rank: int, cases: Sequence[Case], folder: Path) -> list[list[Call]]:
    torch.set_num_threads(1)
    # Triton's kernels need a real GPU, and their failure would be reported.
    sys.modules["triton"] = None  # type: ignore[assignment]
    warnings.simplefilter("ignore")
    calls: list[list[Call]] = [[] for _ in cases]
    # Behave as if each rank ran on its own machine, and treat tensors of more than a hundred values as large.
    with mock.patch.object(process_group, "among_neighbours", _nothing), mock.patch.object(group, "SMALL", 100):
        for size in sorted({case.size for case in cases if case.size > rank}, reverse=True):
            world = join(CPU, rank, size, folder / f"{size} ranks", patience=timedelta(seconds=PATIENCE_S))
            for case, noted in zip(cases, calls, strict=True):
                if case.size == size:
                    with _noting(noted), mock.patch.object(Tensor, "is_cuda", case.path == "gpu"):
                        _train(world, case)
            world.close()
    return calls


def _train(world: World, case: Case) -> None:
    train = {"batch_size": 26, "precision": "fp32"} | case.train
    job = job_of({"d_sae": 48, "k": 3, "dead_after_tokens": 20} | case.sae, train, case.parallel)
    layout = Layout(job, world.size)
    shares = even(layout.data_ranks, layout.latent_ranks)
    if job.parallel.shares != "auto":
        shares = parse_shares(job.parallel.shares, layout.latent_ranks)
    parallel = Grid(world, job, shares)
    learner = Learner(job, D_IN, None, parallel)
    x = torch.randn(layout.tokens_per_step, D_IN, generator=torch.Generator().manual_seed(0)) + torch.arange(D_IN)
    learner.initialise(x, x)
    cut = cut_of(layout, parallel)
    data = IndexedData(_Stored(x), 0, 0, Group(), readers=parallel.latents)
    with contextlib.closing(Batches(data, cut, start=0, device=CPU)) as batches:
        for step in range(N_STEPS):
            take_step([learner], parallel, step, (batches.next() for _ in cut.token_slices))


class _Stored(IndexedSource):
    """Rows in memory."""

    def __init__(self, x: Tensor) -> None:
        self._x, self.n_tokens, self.d_in = x, len(x), D_IN

    def rows(self, indices: Indices) -> Tensor:
        return self._x[torch.from_numpy(indices)]

    def name_of(self, index: int) -> str:
        return f"row {index}"


@contextlib.contextmanager
def _noting(calls: list[Call]) -> Iterator[None]:
    """Within the context, log all calls to `torch.distributed` functions on any group."""
    with contextlib.ExitStack() as stack:

        @contextlib.contextmanager
        def together(over: Any) -> Iterator[None]:
            members = tuple(dist.get_process_group_ranks(over))
            calls.append(Call("coalescing", members, ()))
            with mock.patch.object(Tensor, "is_cuda", False), coalescing(over):
                yield
            calls.append(Call("coalesced", members, ()))

        coalescing = group._coalescing
        stack.enter_context(mock.patch.object(group, "_coalescing", together))
        stack.enter_context(mock.patch.object(group, "packs", _packs_with_parts))
        for place, name, signature in _exchanging():
            stack.enter_context(mock.patch.object(place, name, _noted(getattr(place, name), signature, calls)))
        yield


@functools.cache
def _exchanging() -> list[tuple[Any, str, inspect.Signature]]:
    """Return the module, name and signature of every function that exchanges data over a group."""
    public = [(dist, name) for name in vars(dist) if not name.startswith(("_", "get_", "destroy_", "new_"))]
    found = []
    for place, name in [*((group, name) for name in BOUND), *public]:
        one = vars(place)[name]
        if type(one) is types.FunctionType and "group" in (signature := inspect.signature(one)).parameters:
            found.append((place, name, signature))
    return found


def _packs_with_parts(tensors: Iterable[Tensor]) -> list[group.Pack]:
    """Describe a packed tensor by the shapes of its parts."""
    found = _packs(tensors)
    for pack in found:
        pack.flat.parts = [list(one.shape) for one in pack.tensors]  # type: ignore[attr-defined]
    return found


def _noted(function: Callable[..., Any], signature: inspect.Signature, calls: list[Call]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(_call_of(function.__name__, signature.bind(*args, **kwargs).arguments))
        # If tensors reported here that they are on a GPU, the call would need a GPU driver.
        with mock.patch.object(Tensor, "is_cuda", False):
            return function(*args, **kwargs)

    return call


def _call_of(name: str, arguments: dict[str, Any]) -> Call:
    rest = dict(arguments)
    members = tuple(dist.get_process_group_ranks(rest.pop("group")))
    sends, receives = (tuple(rest.pop(f"{side}_split_sizes", ())) for side in ("input", "output"))
    own_rows = bool(sends)
    words = tuple(f"{argument}: {_in_words(one, own_rows)}" for argument, one in rest.items())
    return Call(name, members, words, sends, receives)


def _in_words(one: Any, own_rows: bool) -> str:
    if not isinstance(one, Tensor):
        return str(one)
    return f"{one.dtype} {getattr(one, 'parts', list(one.shape[own_rows:]))}"


def _nothing(*_: Any, **__: Any) -> None:
    return None

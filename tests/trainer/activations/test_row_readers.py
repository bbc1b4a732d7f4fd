"""Tests that training is bit-identical if each rank reads a shard of every batch instead of the full batch."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support import rank_faults
from support.combinations import slow_except
from torch import Tensor

from trainer.activations.base import Empty, IndexedSource, Indices, Pair, empty_rows
from trainer.activations.batches import Batches
from trainer.activations.int8_rows import encoded
from trainer.activations.micro_batches import Cut
from trainer.activations.outliers import Outliers
from trainer.activations.shards import Shards
from trainer.activations.side_by_side import SideBySide
from trainer.activations.synthetic import Synthetic
from trainer.activations.training_data import IndexedData
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED
from trainer.contract.settings.job import JobConfig
from trainer.contract.store.metrics_store import SeriesReader
from trainer.parallel.group import Group, PeerLost
from trainer.parallel.threads import Threads, on_all

CPU = torch.device("cpu")
KINDS = ("shards", "mixture", "transcoder", "hooks", "synthetic")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8)
N_BATCHES = 5
MakeJob = Callable[..., JobConfig]


class Plan(NamedTuple):
    """A batch of `n_tokens` rows starting at position `start` in a source with the given kind, width and dtype."""

    kind: str
    d_in: int
    dtype: torch.dtype
    n_tokens: int
    n_parts: int
    start: int


PLANS = st.builds(
    Plan,
    kind=st.sampled_from(KINDS),
    d_in=st.integers(1, 9),
    dtype=st.sampled_from(DTYPES),
    n_tokens=st.integers(1, 40),
    n_parts=st.integers(1, 3),
    start=st.integers(0, 300),
)


def folder_of(place: Path, n: int, width: int, dtype: torch.dtype, scale: float = 1.0, bad: int = 13) -> str:
    """Write rows to two shards and return the folder. Some rows are zero or huge, and every `bad`th row is NaN."""
    folder = place / f"{n}-{width}-{dtype}-{scale}"
    if not folder.exists():
        folder.mkdir()
        rows = scale * torch.randn(n, width, generator=torch.Generator().manual_seed(n))
        rows[::7] = 0
        rows[3::11] *= 500
        rows[5::bad] = torch.nan
        for number, part in enumerate(rows.split(n // 2 + 1)):
            stored = {"activations": part.to(dtype)}
            if dtype == torch.int8:
                mean = torch.linspace(-2, 5, width) * scale
                stored = {"int8_rows": encoded(part, mean), "int8_mean": mean}
            save_file(stored, folder / f"{number}.safetensors")
    return str(folder)


def source_of(plan: Plan, place: Path) -> IndexedSource:
    rows = folder_of(place, 60, plan.d_in, plan.dtype)
    if plan.kind == "mixture":
        others = folder_of(place, 45, plan.d_in, torch.bfloat16)
        return Shards(path=[rows, others], weights=[2.0, 1.0])
    if plan.kind == "transcoder":
        return Shards(path=rows, target_path=folder_of(place, 60, plan.d_in + 2, torch.float32, 2.0))
    if plan.kind == "hooks":
        other = folder_of(place, 60, plan.d_in, torch.float32, 3.0)
        return SideBySide([Shards(path=rows), Shards(path=other)])
    if plan.kind == "synthetic":
        return Synthetic(d_in=plan.d_in, n_features=12, active=2.0, skew=1.0, noise=0.1, n_rows=60, data_seed=3)
    return Shards(path=rows)


def open_batches(source: IndexedSource, plan: Plan, readers: Group, *, outliers: Sequence[Outliers] = ()) -> Batches:
    data = IndexedData(source, 5, 0, Group(), readers=readers)
    return Batches(data, Cut(plan.n_tokens, plan.n_parts), start=plan.start, device=CPU, outliers=outliers)


def batches_of(plan: Plan, place: Path, readers: Group) -> tuple[list[list[Pair]], list[Tensor]]:
    """Return several batches from all hooks, with outliers replaced, and the number of dropped rows per hook."""
    source = source_of(plan, place)
    samples = [source.of_hook(hook).pairs(range_of(60)) for hook in range(source.n_hooks)]
    outliers = [Outliers(x.float(), x.float() if y is x else y.float(), 5.0, drops_zero=True) for x, y in samples]
    with contextlib.closing(open_batches(source, plan, readers, outliers=outliers)) as batches:
        return [list(batches.next().hooks) for _ in range(N_BATCHES)], [one.counts for one in outliers]


def range_of(n: int) -> Indices:
    return torch.arange(n).numpy()


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLANS, size=st.integers(1, 4))
def test_every_rank_gets_the_same_bits_as_a_single_reader(tmp_path: Path, plan: Plan, size: int) -> None:
    expected, left_out = batches_of(plan._replace(n_parts=min(plan.n_parts, plan.n_tokens)), tmp_path, Group())
    plan = plan._replace(n_parts=min(plan.n_parts, plan.n_tokens))
    for batches, counts in on_all(size, lambda readers: batches_of(plan, tmp_path, readers), timeout_s=60):
        assert all(map(torch.equal, counts, left_out))
        for hooks, wanted in zip(batches, expected, strict=True):
            for (x, y), (wanted_x, wanted_y) in zip(hooks, wanted, strict=True):
                assert same_bits(x, wanted_x)
                assert same_bits(y, wanted_y)
                assert (y is x) == (wanted_y is wanted_x)


class Counted(Shards):
    """Shards that count how many rows are read."""

    n_read = 0

    def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        self.n_read += len(indices)
        return super().pairs(indices, empty)


PLAN = Plan("shards", 16, torch.float32, 64, 1, 0)


@pytest.mark.parametrize(("size", "n_each"), [(1, 64), (2, 32), (3, 22)])
def test_each_rank_reads_only_its_share_of_a_batch(size: int, n_each: int, activations: Path) -> None:
    def read(readers: Threads) -> int:
        source = Counted(path=str(activations))
        data = IndexedData(source, 0, 0, Group(), readers=readers)
        for number in range(10):
            data.read(64 * number, 64)
        return source.n_read

    assert on_all(size, read, timeout_s=60) == [10 * n_each] * size


class Late(Threads):
    """A process group that fills gathered tensors only when a rank waits for them, and records all calls."""

    def __init__(self, group: Threads) -> None:
        super().__init__(group._meeting, group.size, group.index)
        self.asked: list[str] = []

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, list[Any]]:
        self.asked.append("begin")
        gathered = torch.full((self.size, *tensor.shape), 255, dtype=torch.uint8)
        return gathered, [lambda: gathered.copy_(self.gather(tensor))]

    def finish(self, transfers: list[Any]) -> None:
        for transfer in transfers:
            self.asked.append("wait")
            transfer()


def test_the_next_batch_is_exchanged_during_the_current_step(activations: Path) -> None:
    source = Shards(path=str(activations))
    with contextlib.closing(open_batches(source, PLAN, Group())) as batches:
        expected = [batches.next().hooks[0][0] for _ in range(4)]

    def train(group: Threads) -> list[str]:
        readers = Late(group)
        batches = open_batches(source, PLAN, readers)
        for wanted in expected:
            assert torch.equal(batches.next().hooks[0][0], wanted)
            readers.asked.append("step")
        batches.close()
        return readers.asked

    begun = ["begin", "begin", "wait", "step", *["begin", "wait", "step"] * 3, "wait"]
    assert on_all(3, train, timeout_s=60) == [begun] * 3


def test_reading_continues_at_the_next_batch_after_all_ranks_close_their_readers(activations: Path) -> None:
    source = Shards(path=str(activations))
    with contextlib.closing(open_batches(source, PLAN, Group())) as batches:
        expected = [batches.next().hooks[0][0] for _ in range(9)]

    def train(group: Threads) -> Iterator[Tensor]:
        taken, readers = [], Late(group)
        for start in range(0, 9, 3):
            with contextlib.closing(open_batches(source, PLAN._replace(start=64 * start), readers)) as batches:
                taken += [batches.next().hooks[0][0] for _ in range(3)]
        return iter(taken)

    for taken in on_all(2, train, timeout_s=60):
        assert all(map(torch.equal, taken, expected))


class Failing(Shards):
    def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
        raise OSError("the disk went away")


def test_a_rank_that_cannot_read_releases_the_ranks_waiting_for_its_rows(activations: Path) -> None:
    errors: dict[int, BaseException] = {}

    def train(readers: Threads) -> None:
        source = (Failing if readers.index == 1 else Shards)(path=str(activations))
        batches = open_batches(source, PLAN, readers)
        try:
            batches.next()
        except BaseException as error:
            errors[readers.index] = error
            batches.abandon()
            raise

    with pytest.raises(OSError, match="the disk went away"):
        on_all(3, train, timeout_s=60)
    assert [type(errors[rank]) for rank in range(3)] == [PeerLost, OSError, PeerLost]


def test_waiting_for_a_slow_reader_counts_as_waiting_for_ranks_rather_than_for_data(
    activations: Path, eventually: Callable[..., None]
) -> None:
    asked = threading.Event()

    class Slow(Shards):
        def pairs(self, indices: Indices, empty: Empty = empty_rows) -> Pair:
            asked.wait(60)
            return super().pairs(indices, empty)

    def train(readers: Threads) -> tuple[float, float]:
        source = (Slow if readers.index else Shards)(path=str(activations))
        batches = open_batches(source, PLAN, readers)
        if not readers.index:
            eventually(batches._ready.full)
            threading.Timer(0.3, asked.set).start()
        batches.next()
        batches.close()
        return batches.waited_s, readers.waiting.take().seconds()

    (fast_data_s, fast_ranks_s), (slow_data_s, _) = on_all(2, train, timeout_s=60)
    assert fast_data_s < fast_ranks_s
    assert slow_data_s > fast_data_s


# Maps each grid's name to the number of ranks, the mode, and the number of ranks that read different tokens.
GRIDS = {
    "tensor-2": (2, "tensor", 1),
    "tensor-3": (3, "tensor", 1),
    "tensor-4": (4, "tensor", 1),
    "hybrid-4": (4, "hybrid", 2),
}


OF_TIME = "_s$|_ms$|memory|data_wait|core_share|foreign"


def left_by(run_dir: Path) -> dict[str, Any]:
    """Return the tensors in the exported SAEs and the latest checkpoint, and all metrics except timings."""
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        curves = {
            name: [(one.step, one.value) for one in reader.points(name, rank)]
            for name, rank in reader.series()
            if not re.search(OF_TIME, name)
        }
    files = [
        *(run_dir / "sae").rglob("*.safetensors"),
        max((run_dir / "checkpoints").iterdir()) / "tensors.safetensors",
    ]
    return {"curves": curves} | {str(file.relative_to(run_dir)): load_file(file) for file in files}


def same_files(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["curves"] == other["curves"]
    assert one.keys() == other.keys()
    for file in one.keys() - {"curves"}:
        assert one[file].keys() == other[file].keys()
        for name, tensor in one[file].items():
            assert same_bits(tensor.reshape(-1), other[file][name].reshape(-1)), (file, name)


@pytest.fixture
def awkward_data(tmp_path: Path) -> dict[str, Any]:
    """Return settings for data in two dtypes with outliers, non-finite rows and an odd width."""

    def folder(n: int, width: int, dtype: torch.dtype) -> str:
        return folder_of(tmp_path, n, width, dtype, bad=400)

    return {
        "path": [folder(600, 15, torch.float32), folder(450, 15, torch.bfloat16)],
        "weights": [2.0, 1.0],
        "target_path": [folder(600, 7, torch.float16), folder(450, 7, torch.float32)],
        "max_norm": 5.0,
    }


TRAIN = {
    "batch_size": 32,
    "accumulate": 2,
    "n_steps": 10,
    "log_every": 4,
    "eval_every": 4,
    "checkpoint_every": 4,
    "report_card": False,
}
# Measured shares vary between runs, and a different summation order would change the lowest bits of the results.
STEADY = {"shares": "even", "rebalance": False}
SAE = {"architecture": "batch_topk", "d_sae": 48, "k": 4, "dead_after_tokens": 240, "resample_every_tokens": 240}


@pytest.mark.parametrize("grid", slow_except(["tensor-3"], GRIDS))
def test_sharded_and_full_batches_give_bit_identical_weights_and_metrics(
    grid: str, make_job: MakeJob, start_ranks: Callable, awkward_data: dict[str, Any], tmp_path: Path
) -> None:
    size, mode, n_data = GRIDS[grid]
    job = make_job(data=awkward_data, sae=SAE, train=TRAIN, parallel=STEADY | {"mode": mode})
    results = []
    for name, parts in (("whole", False), ("parts", True)):
        counts = tmp_path / f"{name}.json"
        ranks = start_ranks(
            job, size, run_dir=tmp_path / name, prepare=rank_faults.Reading(parts=parts, counts=str(counts))
        )
        assert ranks.wait() == [EXIT_FINISHED] * size
        results.append((left_by(ranks.spec.run_dir), read_of_a_batch(counts, size)))
    (whole, n_whole), (parts, n_parts) = results
    same_files(whole, parts)
    assert n_whole == [{32}] * size
    assert n_parts == [{-(-32 * n_data // size)}] * size


def read_of_a_batch(counts: Path, size: int) -> list[set[int]]:
    """Return the set of read sizes for each rank, in rows."""
    return [set(json.loads(counts.with_suffix(f".{rank}").read_text())) for rank in range(size)]


@pytest.mark.slow
def test_a_stopped_run_continues_with_the_same_rows_as_an_uninterrupted_run(
    make_job: MakeJob, start_ranks: Callable, awkward_data: dict[str, Any], tmp_path: Path
) -> None:
    job = make_job(data=awkward_data, sae=SAE, train=TRAIN, parallel=STEADY | {"mode": "tensor"})
    parts = rank_faults.Reading(parts=True)
    whole = start_ranks(job, 3, run_dir=tmp_path / "whole", prepare=rank_faults.Reading(parts=False))
    assert whole.wait() == [EXIT_FINISHED] * 3
    stopped = start_ranks(job, 3, run_dir=tmp_path / "stopped", prepare=rank_faults.Reading(parts=True, stops_after=7))
    assert stopped.wait() == [EXIT_STOPPED] * 3
    newest = max((stopped.spec.run_dir / "checkpoints").iterdir())
    resumed = start_ranks(job, 3, run_dir=tmp_path / "stopped", attempt=2, resume_from=newest, prepare=parts)
    assert resumed.wait() == [EXIT_FINISHED] * 3
    same = [left_by(ranks.spec.run_dir) for ranks in (whole, resumed)]
    for one in same:
        one["curves"] = {}
    same_files(*same)


def test_if_a_rank_cannot_read_data_the_other_ranks_fail_with_a_one_sentence_error(
    make_job: MakeJob, start_ranks: Callable
) -> None:
    job = make_job(parallel={"mode": "tensor"}, train={"n_steps": 10**6})
    ranks = start_ranks(job, 3, prepare=rank_faults.Reading(parts=True, fails_at=6, failing=1))
    assert ranks.wait(60) == [EXIT_FAILED] * 3
    folder = ranks.spec.run_dir / "attempt1"
    errors = [json.loads((folder / f"rank{rank}.exit.json").read_text())["error"] for rank in range(3)]
    assert errors[1] == "data.path: the disk went away"
    for rank in (0, 2):
        assert errors[rank].startswith("the connection to another rank was lost")
        assert "\n" not in errors[rank]

"""Tests training on a stream: each row is read once, in shuffled order, even if ranks are killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.combinations import slow_except
from support.toy_stream import ENTRY

from trainer.cli import main
from trainer.contract.errors import UserError
from trainer.contract.planning.workload import Layout
from trainer.contract.runs.checkpoint_manifest import newest_whole
from trainer.contract.runs.rank_spec import EXIT_FAILED, EXIT_FINISHED, RankSpec, rank_environment
from trainer.contract.settings import catalog
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job, parse_job
from trainer.contract.store.metrics_store import SeriesReader

N_STEPS, BATCH, KILLED_AT = 30, 64, 23


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.SOURCES, "toy", ENTRY)
    # The sample is small enough for a resumed run to reread it quickly.
    monkeypatch.setattr("trainer.activations.training_data.SAMPLE_TOKENS", 600)


def toy_table(**sections: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, dict[str, Any]] = {
        # A run reads three blocks of the shuffle buffer.
        "data": {"source": "toy", "shuffle_tokens": 500, "held_out_tokens": 100},
        "sae": {"d_sae": 64, "k": 4, "dead_after_tokens": 400, "resample_every_tokens": 500},
        "train": {"batch_size": BATCH, "n_steps": N_STEPS, "lr": 3e-3, "log_every": 5, "checkpoint_every": 10},
        "parallel": {"shares": "even", "rebalance": False},
        "launch": {"gpus": "cpu"},
    }
    return {name: table.get(name, {}) | sections.get(name, {}) for name in table}


def toy_job(**sections: dict[str, Any]) -> JobConfig:
    job, problems = parse_job(toy_table(**sections))
    assert job is not None, problems
    return job


class Attempts:
    """A run's attempts. Ranks are forked from this process, because the toy source is registered here."""

    def __init__(self, job: JobConfig, run_dir: Path, world_size: int = 1) -> None:
        self.job, self.run_dir, self.world_size = job, run_dir, world_size
        self._number = 0

    def go(self, world_size: int | None = None, killed_at: int = 0) -> list[int]:
        """Run the next attempt from the latest checkpoint, and return the ranks' exit codes.

        If `killed_at` is not 0, rank 0 kills itself after that step.
        """
        self._number += 1
        self.run_dir.mkdir(exist_ok=True)
        (self.run_dir / "job.toml").write_text(dump_job(self.job))
        n, saved = world_size or self.world_size, self.run_dir / "checkpoints"
        resume_from = newest_whole(saved) if saved.exists() else None
        spec = RankSpec(self.run_dir, self.run_dir / "sae", self._number, n, "cpu", resume_from=resume_from)
        (self.run_dir / f"attempt{self._number}").mkdir()
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=be_rank, args=(spec, rank, killed_at)) for rank in range(n)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        return [rank.exitcode for rank in ranks]

    def error(self, rank: int = 0) -> str:
        return (self.run_dir / f"attempt{self._number}" / f"rank{rank}.exit.json").read_text()

    def curve(self, name: str) -> list[float | None]:
        with contextlib.closing(SeriesReader(self.run_dir / "metrics.db")) as reader:
            return [point.value for point in reader.points(name)]


def be_rank(spec: RankSpec, rank: int, killed_at: int) -> None:
    os.environ.update(rank_environment(spec, rank))
    from trainer.ranks.rank import main
    from trainer.reporting.progress import StoredProgress

    class Killed(StoredProgress):
        def heartbeat(self, phase: str, step: int, tokens: int) -> None:
            super().heartbeat(phase, step, tokens)
            if killed_at and step == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)

    # The rank takes `StoredProgress` from the module when it starts.
    import trainer.reporting.progress as progress

    progress.StoredProgress = Killed
    main(spec)


@pytest.mark.parametrize("world_size", slow_except([2], [1, 2]))
def test_a_killed_and_resumed_run_has_the_same_weights_as_an_uninterrupted_one(world_size: int, tmp_path: Path) -> None:
    job = toy_job(launch={"gpus": f"cpu:{world_size}"}, train={"batch_size": BATCH // world_size})
    whole, killed = Attempts(job, tmp_path / "whole", world_size), Attempts(job, tmp_path / "killed", world_size)
    assert whole.go() == [EXIT_FINISHED] * world_size
    codes = killed.go(killed_at=KILLED_AT)
    assert codes == [-signal.SIGKILL, EXIT_FAILED][:world_size]
    assert killed.go() == [EXIT_FINISHED] * world_size

    last = f"step-{N_STEPS:08d}"
    for file in ("tensors.safetensors", "random.safetensors", "state.json"):
        both = [(one.run_dir / "checkpoints" / last / file).read_bytes() for one in (whole, killed)]
        assert both[0] == both[1], file
    exported = [load_file(one.run_dir / "sae" / "sae_weights.safetensors") for one in (whole, killed)]
    assert all(torch.equal(tensor, exported[1][name]) for name, tensor in exported[0].items())
    for name in ("loss", "fvu", "heldout_fvu"):
        assert whole.curve(name) == killed.curve(name), name
    assert len(whole.curve("loss")) == N_STEPS // 5
    assert whole.curve("fvu")[-1] < whole.curve("fvu")[0]
    assert whole.curve("heldout_fvu")[-1] == pytest.approx(whole.curve("fvu")[-1], rel=0.3)


@pytest.mark.slow
def test_a_stream_is_not_resumed_on_a_different_number_of_data_parallel_ranks(tmp_path: Path) -> None:
    run = Attempts(toy_job(train={"n_steps": 10}), tmp_path / "run")
    run.go()
    run.job = toy_job(train={"n_steps": 20, "global_batch_size": BATCH})
    assert run.go(world_size=2) == [EXIT_FAILED] * 2
    assert "launch.gpus: the stream was read in 1 parts, one for each rank that reads tokens" in run.error()
    run.job = toy_job(train={"n_steps": 20}, parallel={"mode": "tensor"})
    assert run.go(world_size=2) == [EXIT_FINISHED] * 2


def test_ranks_sharing_the_latents_read_the_same_rows_as_a_single_rank(tmp_path: Path) -> None:
    together, alone = Attempts(toy_job(parallel={"mode": "tensor"}), tmp_path / "two"), tmp_path / "one"
    assert together.go(world_size=2) == [EXIT_FINISHED] * 2
    one = Attempts(toy_job(), alone)
    one.go()
    for name in ("loss", "fvu", "heldout_fvu"):
        assert together.curve(name) == pytest.approx(one.curve(name), rel=1e-3), name


# Tests for non-finite rows.


def test_a_non_finite_row_in_a_stream_is_replaced_and_reported(make_trainer: Callable, kept: Any) -> None:
    trainer = make_trainer(toy_job(data={"first_bad": 1000}, train={"log_every": 2}), kept)
    assert trainer.run()
    assert sum(kept.curve("skipped_steps")) == 0
    ((_, level, message),) = [event for event in kept.events if event[0] == "not_finite"]
    assert level == "warning"
    assert message.endswith("a toy stream contains NaN or infinite values in row 1000")


@pytest.mark.parametrize(
    ("first", "what"), [(700, "rows read so far are not fin"), (100, "in row 100 (600 of 600 rows); extract")]
)
def test_a_run_fails_and_names_a_row_if_too_many_rows_are_non_finite(
    first: int, what: str, make_trainer: Callable
) -> None:
    with pytest.raises(UserError) as caught:
        make_trainer(toy_job(data={"first_bad": first, "bad_rows": 10**6})).run()
    assert str(caught.value).startswith("data.path: a toy stream contains NaN or infinite values")
    assert what in str(caught.value)


# Tests for stream settings and estimates.


def test_a_job_on_a_stream_without_a_length_is_refused() -> None:
    table = toy_table()
    del table["train"]["n_steps"]
    job, (problem,) = parse_job(table)
    assert job is None
    assert problem.path == "train.n_tokens"
    assert problem.message.startswith("is missing, but the data is an endless stream")
    for length in ({"n_tokens": 10**6}, {"n_steps": 3}):
        assert Layout(toy_job(train={"n_steps": None} | length), 1).total_steps == (length.get("n_steps") or 15_625)


def test_the_estimate_for_a_stream_needs_only_the_number_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.toml").write_text(dump_job(toy_job(train={"n_steps": 10_000})))
    assert main(["estimate", str(tmp_path / "job.toml")]) == EXIT_FINISHED
    assert "tokens/s" in capsys.readouterr().out

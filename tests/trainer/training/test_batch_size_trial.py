"""Trials of the micro-batch size under a real shortage of memory: a rank's address space is limited at its start."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.rank_faults import log_in_little_memory

from trainer.contract.runs.rank_spec import EXIT_FINISHED
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.store.metrics_store import SeriesReader
from trainer.training.loop import halved_sentence

STEP = 8192
# Pre-activations of all tokens take 256 MiB. A pass first requests twice that, and 128 MiB for threads.
TIGHT_MIB = 900
# Modes with an exchange in the middle of a pass.
EXCHANGING = [("tensor", "topk"), ("ddp", "batch_topk")]


def shared_job(mode: str, architecture: str, batch_size: object) -> JobConfig:
    """Make a job with even shares: measured ones would differ from run to run."""
    table = {
        "data": {"source": "synthetic", "d_in": 32, "held_out_tokens": 1000},
        "sae": {"d_sae": 8192, "k": 8, "architecture": architecture},
        "train": {"n_steps": 2, "log_every": 1, "batch_size": batch_size, "global_batch_size": STEP},
        "parallel": {"mode": mode, "shares": "even"},
    }
    job, problems = parse_job(table)
    assert job is not None, problems
    return job


def curve(run_dir: Path, name: str) -> list[float | None]:
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        return [point.value for point in reader.points(name)]


def tokens(run_dir: Path) -> int:
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        heartbeat = reader.heartbeat()
    assert heartbeat
    return heartbeat.tokens


def trials(log: Path) -> list[str]:
    return re.findall(r"([\d,]+) tokens at a time do not fit: trying ([\d,]+)", log.read_text())


def test_micro_batches_are_halved_until_they_fit_and_the_step_keeps_its_size(
    start_ranks: Callable, tmp_path: Path
) -> None:
    fvu = {}
    # Rank 0 is the only rank, so a limit for rank 1 has no effect.
    for name, starved in {"roomy": 1, "tight": 0}.items():
        (folder := tmp_path / name).mkdir()
        prepare = functools.partial(log_in_little_memory, TIGHT_MIB, starved, folder)
        job = shared_job("single", "topk", "auto")
        assert start_ranks(job, 1, run_dir=folder / "run", prepare=prepare).wait() == [EXIT_FINISHED], name
        assert tokens(folder / "run") == 2 * STEP
        fvu[name] = curve(folder / "run", "heldout_fvu")[-1]
    assert trials(tmp_path / "roomy" / "0.log") == []
    assert trials(tmp_path / "tight" / "0.log")[0] == ("8,192", "4,096")
    with contextlib.closing(SeriesReader(tmp_path / "tight" / "run" / "metrics.db")) as reader:
        (message,) = [event.message for event in reader.events() if event.kind == "halved"]
    assert message.startswith("8,192 tokens at a time do not fit into memory: each step processes pieces of ")
    assert message.endswith("; the SAE stays the same")
    assert abs(fvu["tight"] - fvu["roomy"]) < 1e-4


@pytest.mark.parametrize(("mode", "architecture"), EXCHANGING)
def test_both_ranks_halve_their_micro_batches_if_one_lacks_memory(
    mode: str, architecture: str, start_ranks: Callable, tmp_path: Path
) -> None:
    job = shared_job(mode, architecture, "auto")
    # Each rank holds half of the matrix that a single rank would hold.
    prepare = functools.partial(log_in_little_memory, TIGHT_MIB // 2, 1, tmp_path)
    ranks = start_ranks(job, 2, run_dir=tmp_path / "tight", prepare=prepare)
    assert ranks.wait() == [EXIT_FINISHED] * 2, ranks.processes[1].stderr.read()
    of_ranks = [trials(tmp_path / f"{rank}.log") for rank in range(2)]
    assert of_ranks[0] == of_ranks[1] != []
    settled = shared_job(mode, architecture, int(of_ranks[0][-1][1].replace(",", "")))
    assert start_ranks(settled, 2, run_dir=tmp_path / "settled").wait() == [EXIT_FINISHED] * 2
    assert curve(tmp_path / "tight", "loss") == curve(tmp_path / "settled", "loss")
    assert len(curve(tmp_path / "tight", "loss")) == 2


def test_halving_is_reported_to_change_the_sae_if_latents_are_chosen_per_piece() -> None:
    message = halved_sentence(shared_job("single", "batch_topk", "auto"), 8192, 4096)
    assert message.endswith("; batch_topk choose latents within each piece, and learn a different SAE than with 8,192")

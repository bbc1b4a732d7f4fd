"""Memory that is really missing: the address space of a run, or of one of its ranks, is limited as it starts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.contract.runs.rank_spec import EXIT_FINISHED, rank_command
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job
from trainer.contract.store.metrics_store import SeriesReader

STEP = 32768
JOB = f"""
name = "tight"
[data]
source = "synthetic"
d_in = 32
held_out_tokens = 1000
[sae]
d_sae = 8192
k = 8
[train]
n_steps = 2
batch_size = "auto"
global_batch_size = {STEP}
[launch]
gpus = "cpu"
"""
ROOMY, TIGHT = 2**34, 1_900_000_000
# Modes with an exchange in the middle of a pass.
EXCHANGING = [("tensor", "topk"), ("ddp", "batch_topk")]


def trained(folder: Path, limit_bytes: int) -> tuple[dict[str, float], str]:
    """Train with a limited address space; return the result of the job and the log of its rank."""
    folder.mkdir()
    (folder / "job.toml").write_text(JOB)
    command = [sys.executable, "-m", "trainer", "run", str(folder / "job.toml"), "--out", str(folder / "run"), "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes)),
        timeout=200,
    )
    log = (folder / "run" / "logs" / "rank0.log").read_text()
    assert done.returncode == 0, done.stderr + log
    return json.loads(done.stdout.splitlines()[-1]), log


def test_micro_batches_are_halved_until_they_fit_and_the_step_stays_what_it_is(tmp_path: Path) -> None:
    roomy, plain = trained(tmp_path / "roomy", ROOMY)
    tight, log = trained(tmp_path / "tight", TIGHT)
    assert "do not fit" not in plain
    assert "32,768 tokens at a time do not fit: 16,384 are tried" in log
    assert tight["tokens"] == roomy["tokens"] == 2 * STEP
    assert abs(tight["fvu"] - roomy["fvu"]) < 1e-4


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


def with_rank_1_in(limit_bytes: int, logs: Path) -> Callable[[Path], list[str]]:
    """Return the command of ranks of which all but rank 0 have less memory; each writes a log."""
    script = f'[ "$RANK" = 0 ] || ulimit -v {limit_bytes // 1024}; exec "$@" >"{logs}/$RANK.log"'
    return lambda spec: ["sh", "-c", script, "sh", *rank_command(spec)]


def losses(run_dir: Path) -> list[float | None]:
    with contextlib.closing(SeriesReader(run_dir / "metrics.db")) as reader:
        return [point.value for point in reader.points("loss")]


@pytest.mark.parametrize(("mode", "architecture"), EXCHANGING)
def test_where_one_of_two_ranks_lacks_memory_both_halve_and_learn_what_they_do_without_a_trial(
    mode: str, architecture: str, start_ranks: Callable, tmp_path: Path
) -> None:
    job = shared_job(mode, architecture, "auto")
    # Half of the matrix of an SAE on one rank is on each of them.
    ranks = start_ranks(job, 2, run_dir=tmp_path / "tight", command=with_rank_1_in(TIGHT, tmp_path))
    assert ranks.wait() == [EXIT_FINISHED] * 2, ranks.processes[1].stderr.read()
    logs = [(tmp_path / f"{rank}.log").read_text() for rank in range(2)]
    trials = [re.findall(r"at a time do not fit: ([\d,]+) are tried", log) for log in logs]
    assert trials[0] == trials[1] != []
    settled = shared_job(mode, architecture, int(trials[0][-1].replace(",", "")))
    assert start_ranks(settled, 2, run_dir=tmp_path / "settled").wait() == [EXIT_FINISHED] * 2
    assert losses(tmp_path / "tight") == losses(tmp_path / "settled")
    assert len(losses(tmp_path / "tight")) == 2

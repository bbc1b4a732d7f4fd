"""Tests for commands that run extraction jobs, with real processes and a tiny model."""

from __future__ import annotations

import contextlib
import hashlib
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from cli.conftest import Shell
from jobs.conftest import wait_for
from support.box import wait_for_state
from support.extractions import extraction_job, run, run_ranks
from support.tiny_models import make_model, sentences

from trainer.contract.planning.stored_extraction import n_stored_rows
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job_file import to_table
from trainer.contract.store.job_store import Control

# Enough rows for an extraction to take several seconds; it writes a shard about every 0.1 s.
N_ROWS = 40_000


@pytest.fixture
def job(shell: Shell) -> ExtractJob:
    """Write the job file, the model and the text for an extraction job."""
    text = shell.folder / "corpus.txt"
    text.write_text("\n\n".join(sentences(4000)))
    model = make_model(shell.folder / "gpt2", "gpt2")
    job = extraction_job(model, text, shell.folder / "rows", n_tokens=N_ROWS, shard_rows=1024, batch_tokens=32)
    write(job, shell, launch={"gpus": "auto", "max_restarts": 1})
    return job


def write(job: ExtractJob, shell: Shell, **sections: dict[str, Any]) -> None:
    shell.job_file.write_text(tomli_w.dumps(to_table(job) | sections))


def digests(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*/*.safetensors"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "size"), [("auto", 1), ("auto:2", 2)])
def test_a_killed_stopped_and_resumed_extraction_writes_the_same_rows(
    shell: Shell, job: ExtractJob, tmp_path: Path, gpus: str, size: int
) -> None:
    write(job, shell, launch={"gpus": gpus, "max_restarts": 1})
    valid = shell.json("validate", shell.job_file)
    assert (valid["valid"], valid["errors"], valid["mode"]) == (True, [], "single")
    assert valid["disk_free_bytes"] > valid["disk_bytes"] > 2 * 4 * 32 * N_ROWS
    assert valid["seconds"] > 0
    assert re.search(r" of disk, [\d.]+ GiB free; about ", shell.run("validate", shell.job_file).stdout)
    launched = shell.json("launch", shell.job_file)
    rows = Path(job.extract.output)
    wait_for(lambda: len(digests(rows)) >= 4, "two shards of each hook", 120)
    with contextlib.closing(Control(shell.data.control_db, readonly=True)) as control:
        *_, last = control.ranks(launched["id"])
        assert last.rank == size - 1
        last.process.send(signal.SIGKILL)
        wait_for(lambda: control.job(1).attempt == 2, "a restart", 60)
    stored = len(digests(rows))
    wait_for(lambda: len(digests(rows)) > stored, "another shard", 120)
    shell.run("stop", 1)
    wait_for_state(shell.data, 1, "stopped")
    n_stored = n_stored_rows(job)
    stopped = shell.json("job", 1)
    assert 0 < stopped["step"] < N_ROWS
    assert stopped["output_path"] == str(rows)
    assert n_stored in range(1024, N_ROWS, 1024)
    said = f"resumes after the {n_stored:,} rows of its complete shards"
    assert said in shell.run("resume", 1, "--wait").stdout
    finished = shell.json("job", 1)
    assert (finished["state"], finished["step"]) == ("finished", N_ROWS)
    assert finished["peak_memory_bytes"] > 0
    assert finished["estimated_memory_bytes"] == stopped["estimated_memory_bytes"] > 0
    undisturbed = extraction_job(
        Path(job.model.path), Path(job.text.path or ""), tmp_path / "alone", n_tokens=N_ROWS, shard_rows=1024,
        batch_tokens=32,
    )  # fmt: skip
    run(undisturbed) if size == 1 else run_ranks(undisturbed, size, tmp_path / "meet")
    assert digests(rows) == digests(tmp_path / "alone")
    assert "has finished; clone it" in shell.errors("resume", 1, code=1)[0]


def test_problems_with_an_extraction_are_reported_before_it_is_launched(shell: Shell, job: ExtractJob) -> None:
    write(job, shell, text={"path": str(shell.folder / "nothing.txt")})
    assert shell.errors("launch", shell.job_file, code=1) == [
        "sae-tui: error: text.context: must be at most 64, the model's context length, not 256",
        f"sae-tui: error: text.path: there is nothing at {shell.folder}/nothing.txt",
    ]
    write(job, shell, extract={"n_tokens": 10**12, "output": str(shell.folder / "rows")})
    assert "extract.n_tokens: 1,000,000,000,000 rows take" in shell.errors("launch", shell.job_file, code=1)[0]
    write(job, shell, model={"path": str(shell.folder / "no-model"), "hooks": ["resid_post.0"]})
    assert "model.path: there is nothing at" in shell.errors("launch", shell.job_file, code=1)[0]
    assert shell.json("jobs") == []


TRAINING = """
[data]
path = "{path}"
[sae]
d_sae = 64
k = 4
[train]
batch_size = 64
n_steps = 4
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_training_job_waits_for_its_extraction_and_reports_too_few_rows(shell: Shell, job: ExtractJob) -> None:
    rows = Path(job.extract.output)
    (training := shell.folder / "training.toml").write_text(TRAINING.format(path=rows / "mlp_out.0"))
    wanted = shell.json("launch", shell.job_file, "--hold", "--set", "extract.n_tokens=100_000_000")["id"]
    assert "data.path: there is nothing at" in shell.errors("launch", training, code=1)[0]
    shell.json("launch", training, "--after", wanted)
    wider = ["--set", "train.batch_size=200_000_000"]
    assert "but" in (told := shell.errors("launch", training, "--after", wanted, *wider, code=1)[0])
    assert "has only 100,000,000" in told
    whole = shell.errors("launch", training, "--after", wanted, "--set", f"data.path={rows}", code=1)[0]
    assert f"job 1 writes a folder for every hook in {rows}; give one of them: mlp_out.0 and resid_post.1" in whole
    waiting = shell.json("job", 2)
    assert (waiting["state"], waiting["after"]) == ("queued", [wanted])
    Path(job.text.path or "").write_text("\n\n".join(sentences(60)))
    shell.run("release", wanted)
    wait_for_state(shell.data, 2, "failed")
    n_rows = shell.json("job", wanted)["step"]
    assert 100 < n_rows < 10_000
    failed = shell.json("job", 2)["error"]
    assert f"mlp_out.0 contains {n_rows:,} rows, but job 1 promised 100,000,000; give that job more text, or " in failed
    shell.run("resume", 2, "--wait")
    assert shell.json("job", 2)["step"] == 4
    # The extraction has ended, so the check uses the number of rows that it actually wrote.
    assert f"has only {n_rows:,}" in shell.errors("launch", training, "--after", wanted, *wider, code=1)[0]

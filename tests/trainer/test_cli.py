from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tqdm import tqdm

from trainer.cli import main
from trainer.contract.config import JobConfig, dump_job, load_job
from trainer.contract.ranks import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE
from trainer.foreground import BAR

FIELDS = {"output_path", "steps", "tokens", "fvu", "l0", "dead_fraction", "tokens_per_s"}


@pytest.fixture
def job_file(make_job: Callable[..., JobConfig], tmp_path: Path) -> Path:
    file = tmp_path / "job.toml"
    file.write_text(dump_job(make_job(launch={"gpus": "cpu"})))
    return file


def start(*arguments: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment, **options
    )


@pytest.mark.parametrize("gpus", ["cpu", "cpu:2"])
def test_a_run_in_the_foreground_prints_its_result_as_the_last_line(gpus: str, job_file: Path, tmp_path: Path) -> None:
    process = start("run", job_file, "--set", f"launch.gpus={gpus}", "--json", cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == EXIT_FINISHED, errors
    result = json.loads(output.splitlines()[-1])
    ranks = 2 if gpus == "cpu:2" else 1
    assert result.keys() >= FIELDS
    assert (result["steps"], result["tokens"]) == (20, 20 * 128 * ranks)
    assert 0 < result["fvu"] < 1
    assert load_file(Path(result["output_path"]) / "sae_weights.safetensors")["W_enc"].shape == (16, 64)
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert load_job(run_dir / "job.toml").launch.gpus == gpus


def test_ctrl_c_stops_with_a_checkpoint(job_file: Path, tmp_path: Path, eventually: Callable) -> None:
    process = start("run", job_file, "--set", "train.n_steps=10000000", "--out", "out", cwd=tmp_path)
    eventually((tmp_path / "out" / "metrics.db-wal").exists)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED, errors
    assert output.startswith("stopped after ")
    assert list((tmp_path / "out" / "checkpoints").glob("step-*/manifest.json"))


def test_ctrl_c_while_the_ranks_start_ends_them_all_without_a_traceback(
    job_file: Path, tmp_path: Path, eventually: Callable
) -> None:
    settings = ("--set", "train.n_steps=10000000", "--set", "launch.gpus=cpu:2", "--out", "out")
    process = start("run", job_file, *settings, cwd=tmp_path, process_group=0)
    eventually((tmp_path / "out" / "logs" / "rank0.log").exists)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode in (EXIT_STOPPED, EXIT_FAILED), errors
    logs = [file.read_text() for file in (tmp_path / "out" / "logs").iterdir()]
    assert "Traceback" not in "".join([output, errors, *logs])
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_the_bar_has_room_in_80_columns() -> None:
    line = tqdm.format_meter(
        12_345, 100_000, 60, ncols=80, prefix="training", bar_format=BAR, postfix="fvu=0.1031, l0=32"
    )
    assert len(line) <= 80
    assert len(line.split("|")[1]) >= 15


def test_what_makes_a_rank_fail_is_one_line_on_stderr(job_file: Path, activations: Path, tmp_path: Path) -> None:
    shard = activations / "a.safetensors"
    content = bytearray(shard.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # NaN
    shard.write_bytes(content)
    process = start("run", job_file, "--json", cwd=tmp_path)
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, output) == (EXIT_FAILED, "")
    (line,) = errors.splitlines()
    assert line.startswith(f"data.path: {activations} holds NaN or infinite values in row 1699 of a.safetensors")


def test_a_bad_job_file_is_told_whole_one_problem_per_line(
    job_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job_file.write_text('[data]\npath = "gone"\n[sae]\nkk = 1\nd_sae = "wide"\n[train]\nlr = -1\n')
    assert main(["run", str(job_file), "--out", str(tmp_path / "out")]) == EXIT_USAGE
    paths = {line.partition(":")[0] for line in capsys.readouterr().err.splitlines()}
    assert paths == {"sae.kk", "sae.d_sae", "train.lr"}
    assert not (tmp_path / "out").exists()


def test_what_only_the_machine_can_tell_is_told_before_anything_starts(
    job_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["run", str(job_file), "--out", str(tmp_path / "out"), "--set", "sae.k=1000", "--set", "data.path=gone"]
    assert main(arguments) == EXIT_USAGE
    assert capsys.readouterr().err.startswith("data.path: there is nothing at")
    assert main(arguments[:-2]) == EXIT_USAGE
    assert capsys.readouterr().err == "sae.k: must be at most the number of latents, 64, not 1000\n"
    assert not (tmp_path / "out").exists()


def test_a_run_folder_is_never_written_over(job_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.toml").rename(tmp_path / "other.toml")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "job.toml").write_text("mine")
    assert main(["run", str(tmp_path / "other.toml"), "--out", str(tmp_path / "out")]) == EXIT_FAILED
    assert capsys.readouterr().err.startswith("--out: there is a run in")
    assert (tmp_path / "out" / "job.toml").read_text() == "mine"


def test_an_estimate_adds_up_and_names_every_part(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(job_file), "--json"]) == EXIT_FINISHED
    estimate = json.loads(capsys.readouterr().out)
    per_gpu = estimate["per_gpu"]
    total = per_gpu.pop("total")
    assert list(per_gpu) == ["weights", "gradients", "optimizer", "activations", "communication", "context"]
    assert total == sum(per_gpu.values())
    assert per_gpu["weights"] == 4 * (2 * 16 * 64 + 64 + 16)
    assert "seconds" in estimate
    assert main(["estimate", str(job_file)]) == EXIT_FINISHED
    assert "total" in capsys.readouterr().out

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from sae_tui.jobs.launchers import sbatch
from sae_tui.jobs.launchers.sbatch import program_script, script, submission
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import parse_job


def job(**launch: object) -> JobConfig:
    parsed, problems = parse_job({"data": {"path": "acts"}, "launch": {"backend": "slurm"} | launch})
    assert parsed, problems
    return parsed


def spec(world_size: int, device: str = "cuda", run_dir: str = "/runs/4", **fields: object) -> RankSpec:
    folder = Path(run_dir)
    return RankSpec(folder, folder / "sae", attempt=2, world_size=world_size, device=device, job_id=4, **fields)


def submitted(spec: RankSpec, job: JobConfig, name: str = "job") -> list[str]:
    return submission(spec, job.launch, name, Path("/runs/100%/slurm.log"), Path("/runs/4/job.sbatch"))


def test_gpus_and_cores_are_requested_per_node() -> None:
    argv = submitted(spec(8), job(nodes=2, gpus="auto:4", partition="gpu", account="ada", time_limit="4:00:00"))
    wanted = {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=1", "--time=4:00:00"}
    assert wanted | {"--partition=gpu", "--account=ada", "--output=/runs/100%%/slurm.log"} <= set(argv)
    assert argv[:2] == ["sbatch", "--parsable"]
    assert argv[-1] == "/runs/4/job.sbatch"


def test_cpu_ranks_request_no_gpus_and_threads_share_one_task() -> None:
    assert not any("gpus" in part for part in submitted(spec(2, "cpu"), job(gpus="cpu:2")))
    threads = spec(4, as_one_process=True)
    wanted = {"--gpus-per-node=4", "--ntasks-per-node=1", "--cpus-per-task=4"}
    assert wanted <= set(submitted(threads, job(gpus="auto:4")))
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 " in script(threads, job(gpus="auto:4").launch, ["rank"])


def test_srun_starts_every_rank() -> None:
    text = script(spec(8), job(nodes=2, gpus="auto:4").launch, ["rank", "a b"])
    assert "--nodes=2 --ntasks=8 --ntasks-per-node=4 " in text
    assert "\n  rank 'a b' &\n" in text


def test_user_options_come_last_and_replace_the_core_count() -> None:
    argv = submitted(spec(2), job(gpus="auto:2", sbatch_options=["--qos=high", "--cpus-per-gpu=8"]))
    assert argv[-3:-1] == ["--qos=high", "--cpus-per-gpu=8"]
    assert not any(part.startswith("--cpus-per-task") for part in argv)


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [(None, 120), ("2", 30), ("1:20", 20), ("0:04:00", 60), ("1-0", 120), ("90", 120), ("0-0:2", 30)],
)
def test_a_job_gets_a_signal_early_enough_to_save_before_its_time_limit(limit: str | None, seconds: int) -> None:
    assert f"--signal=B:USR1@{seconds}" in submitted(spec(1), job(time_limit=limit))


@pytest.mark.parametrize("name", ["a b\n#SBATCH --nodes=7", "$(touch x)", "--wrap=x", "日本"])
def test_a_job_name_is_converted_to_a_safe_word_for_slurm(name: str) -> None:
    (option,) = [part for part in submitted(spec(1), job(), name) if part.startswith("--job-name=")]
    assert not set(option.partition("=")[2]) & set(" \n$();'\"")


def test_the_script_is_valid_bash_and_quotes_its_arguments(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s $(touch x); "y"'
    text = script(spec(2, "cpu", str(folder)), job(gpus="cpu:2").launch, ["run", str(folder), "a\nb"])
    file = tmp_path / "job.sbatch"
    file.write_text(text)
    assert subprocess.run(["bash", "-n", str(file)], capture_output=True).returncode == 0
    words = shlex.split(text, comments=True)
    assert str(folder) in words
    assert "a\nb" in words


@pytest.mark.parametrize(("number", "code"), [("7", 0), ("5_2\n", 0), ("8", 1)])
@pytest.mark.parametrize("make", ["ranks", "program"])
def test_a_job_whose_number_no_supervisor_has_recorded_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: str, number: str, code: int
) -> None:
    monkeypatch.setattr(sbatch, "WAITS_S", 1)
    run, words = tmp_path / "it's $(touch x)", ["touch", str(tmp_path / "ran")]
    (folder := run / "attempt2").mkdir(parents=True)
    (folder / "slurm_job").write_text(number)
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
    (tmp_path / "srun").chmod(0o755)
    given = spec(1, "cpu", str(run))
    text = program_script(given, words) if make == "program" else script(given, job(gpus="cpu").launch, words)
    array = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"} if "_" in number else {}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", **array}
    done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "ran").exists()) == (code, not code)
    assert ("no supervisor has recorded SLURM job 7" in done.stderr) == bool(code)

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.contract.errors import errors
from trainer.contract.planning.check_job import Machine, check, wanted_ranks
from trainer.contract.settings.backends import check_backend
from trainer.contract.settings.slurm import check_slurm


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set $PATH to a folder that contains nothing but `sbatch`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.parametrize(
    ("gpus", "nodes", "ranks"), [("auto", 1, 1), ("auto:4", 2, 8), ("cpu:2", 3, 6), ([0, 1], 2, 4), ("cpu", 2, 2)]
)
def test_the_number_of_ranks_applies_to_each_node(make_job, gpus, nodes, ranks) -> None:
    assert wanted_ranks(make_job(launch={"backend": "slurm", "nodes": nodes, "gpus": gpus})) == ranks


def test_the_number_of_nodes_is_ignored_with_a_warning_on_the_local_machine(make_job) -> None:
    job = make_job(launch={"nodes": 2, "gpus": "auto:4"})
    assert wanted_ranks(job) == 4
    (problem,) = check_backend(job)
    assert (problem.path, problem.severity) == ("launch.nodes", "warning")
    assert problem.message == '2 nodes need launch.backend = "slurm" or "skypilot"; "local" uses only this machine'


def test_a_machine_without_gpus_can_submit_a_job_for_many(make_job, sbatch, write_shard, tmp_path) -> None:
    data = {"path": str(write_shard())}
    job = make_job(data=data, launch={"backend": "slurm", "nodes": 2, "gpus": "auto:8", "time_limit": "1-12:30:00"})
    problems = check(job, Machine((), 1, tmp_path))
    assert [problem for problem in problems if problem.path.startswith("launch.")] == []


def test_a_missing_sbatch_is_reported_for_the_backend_setting(make_job, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = check_slurm(make_job(launch={"backend": "slurm"}))
    assert problem.path == "launch.backend"
    assert problem.message.startswith('"slurm" requires sbatch, which is not on $PATH here')


@pytest.mark.parametrize(
    ("launch", "path", "text"),
    [
        ({"gpus": [0, 3]}, "launch.gpus", 'so the list is treated as "auto:2", with 2 for each node'),
        ({"partition": "--wrap=x"}, "launch.partition", 'must be a SLURM name, not "--wrap=x"'),
        ({"account": "a b"}, "launch.account", 'not "a b"'),
        ({"time_limit": "2h"}, "launch.time_limit", 'like "90" (minutes), "4:00:00" or "1-12" (days-hours), not "2h"'),
        ({"sbatch_options": ["-p", "x"]}, "launch.sbatch_options", 'must look like "--qos=high"'),
        ({"sbatch_options": ["--qos=a\nb"]}, "launch.sbatch_options", "on one line"),
        ({"sbatch_options": ["--nodes=3"]}, "launch.sbatch_options", "--nodes is set by launch.nodes"),
        (
            {"sbatch_options": ["--wra=x"]},
            "launch.sbatch_options",
            "--wra is short for --wrap, which is set by the launch",
        ),
        (
            {"sbatch_options": ["--out=x"]},
            "launch.sbatch_options",
            "--out is short for --output, which is set by the run",
        ),
        ({"sbatch_options": ["--a=1"]}, "launch.sbatch_options", "--a is short for --array"),
        ({"sbatch_options": ["--gpus-per-task=1"]}, "launch.sbatch_options", "is set by launch.gpus"),
        ({"sbatch_options": ["--clusters=b"]}, "launch.sbatch_options", "--clusters is set by this host's SLURM"),
        ({"sbatch_options": ["--requeue"]}, "launch.sbatch_options", "--requeue is set by launch.max_requeues"),
    ],
)
def test_options_that_sbatch_would_misread_are_reported_before_the_launch(make_job, sbatch, launch, path, text) -> None:
    problem = check_backend(make_job(launch={"backend": "slurm"} | launch))[0]
    assert problem.path == path
    assert text in problem.message


def test_an_option_that_is_a_prefix_of_another_is_accepted(make_job, sbatch) -> None:
    options = ["--gpus=a100:4", "--time-min=10", "--wait-all-nodes=1", "--acctg-freq=30", "--mem=1G", "--no-kill"]
    problems = check_backend(make_job(launch={"backend": "slurm", "sbatch_options": options}))
    assert problems == []


def test_one_process_cannot_use_two_nodes(make_job, sbatch, tmp_path) -> None:
    job = make_job(parallel={"mode": "dp"}, launch={"backend": "slurm", "nodes": 2})
    problems = errors(check(job, Machine((), 1, tmp_path)))
    assert "parallel.mode" in [problem.path for problem in problems if "one node" in problem.message]

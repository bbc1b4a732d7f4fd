"""Tests for SkyPilot task files: what they contain, how they are quoted, and that their script runs."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.sky import Sky, local_text
from support.slurm import free_ports

from sae_tui.jobs.skypilot.task import make_task, slug, to_yaml
from trainer.contract.errors import JobFileError
from trainer.contract.settings.command import CommandJob
from trainer.contract.settings.job import AnyJob
from trainer.contract.settings.job_file import any_job_of

SYNTHETIC = {"source": "synthetic", "d_in": 8}


def job(data: dict | None = None, sae: dict | None = None, train: dict | None = None, **launch: object) -> AnyJob:
    table = {
        "data": data or SYNTHETIC,
        "sae": {"d_sae": 16, "k": 4} | (sae or {}),
        "train": {"n_steps": 20} | (train or {}),
    }
    return any_job_of(table | {"name": "tiny", "launch": {"backend": "skypilot"} | launch})


def task_of(given: AnyJob) -> dict:
    """Return the task as SkyPilot would read it."""
    return yaml.safe_load(make_task(given, "tiny-1").text)


def kinds(task: dict) -> list[str]:
    return [one["accelerators"] for one in task["resources"]["any_of"]]


def refusal(given: AnyJob) -> str:
    with pytest.raises(JobFileError) as caught:
        make_task(given, "tiny-1")
    return str(caught.value)


def test_the_smallest_gpus_that_fit_come_first_and_too_small_ones_are_left_out() -> None:
    assert kinds(task_of(job()))[0] == "T4:1"
    wide = {"d_sae": 4_000_000, "architecture": "topk"}
    large = kinds(task_of(job({"source": "synthetic", "d_in": 512}, wide)))
    assert "T4:1" not in large
    assert "H200:1" in large
    assert "the job needs" in refusal(job({"source": "synthetic", "d_in": 4096}, wide, gpu_kinds=["T4"], gpus="auto:1"))


def test_named_gpus_machines_and_places_are_requested_as_given() -> None:
    given = job(gpu_kinds=["h100:2", "L40S"], gpus="auto", nodes=2, runs_url="s3://b/runs", spot=True, infra="gcp/eu")
    task = task_of(given)
    assert kinds(task) == ["L40S:1", "H100:2"]
    assert task["num_nodes"] == 2
    assert task["resources"]["use_spot"] is True
    assert task["resources"]["infra"] == "gcp/eu"
    assert task["file_mounts"]["~/sae-tui/runs"] == {"source": "s3://b/runs", "mode": "MOUNT_CACHED"}
    assert task["resources"]["disk_size"] >= 100
    assert subprocess.run(["bash", "-n", "-c", task["setup"] + task["run"]]).returncode == 0
    assert task_of(job(gpus="cpu:6"))["resources"]["cpus"] == "6+"


def test_local_data_is_copied_there_and_urls_are_not(tmp_path: Path) -> None:
    folder = tmp_path / "it's 100 % \"#: data"
    folder.mkdir()
    np.save(folder / "0.npy", np.ones((2000, 8), np.float32))
    task = task_of(job({"path": str(folder)}))
    assert task["file_mounts"] == {"~/sae-tui/data/0": str(folder)}
    assert 'path = "/tmp/sae-tui/data/0"' in task["run"]
    text = tmp_path / "texts.jsonl"
    text.write_text('{"text": "a"}\n')
    model = {"path": "owner/model", "hooks": ["resid_post.1"]}
    table = {"kind": "extract", "model": model, "text": {"path": str(text)}}
    extraction = task_of(any_job_of(table | {"launch": {"backend": "skypilot", "gpu_kinds": ["L4:1"]}}))
    assert extraction["file_mounts"] == {"~/sae-tui/data/0/texts.jsonl": str(text)}
    assert 'path = "owner/model"' in extraction["run"]
    (tmp_path / "$HOME").mkdir()
    np.save(tmp_path / "$HOME" / "0.npy", np.ones((2000, 8), np.float32))
    assert "characters that SkyPilot replaces" in refusal(job({"path": str(tmp_path / "$HOME")}))


@pytest.mark.parametrize(
    "value",
    [
        "plain",
        "no",
        "12",
        "1e3",
        "~",
        "~/a b",
        "a: b",
        "a #b",
        "- x",
        "é \U0001f600",
        "\x85\u2028\ufeff\x07",
        '"\\',
        "x:",
        "*a",
        "",
        " ",
    ],
)
def test_every_text_is_read_back_from_yaml_unchanged(value: str) -> None:
    table = {"a": {value or "k": value, "list": [{"b": value, "c": 1.5}, {"d": True}]}, "text": f"x{value}\n  y\n\nz\n"}
    assert yaml.safe_load(to_yaml(copy.deepcopy(table))) == table


def test_a_name_becomes_one_that_every_cloud_accepts() -> None:
    assert [slug(name) for name in ("MiniLM l3, k=32!", "7b", "日本", "x" * 99)] == [
        "minilm-l3-k-32",
        "sae-7b",
        "sae",
        "x" * 24,
    ]


def test_the_words_of_a_command_reach_its_program_unchanged(sky: Sky, tmp_path: Path) -> None:
    words = ["it's", '$HOME `id` \\ "x"', "{gpus}", "a{gpus}b {gpu_list}", "", "é"]
    argv = ["printf", "%s|", *words]
    table = {"kind": "command", "command": {"argv": argv, "folder": str(tmp_path), "env": ["A=b c", "B=no"]}}
    given = any_job_of(table | {"launch": {"backend": "skypilot", "gpu_kinds": ["H100:2"]}})
    assert isinstance(given, CommandJob)
    task = task_of(given)
    assert task["workdir"] == str(tmp_path)
    assert task["envs"] == {"A": "b c", "B": "no"}
    ran = run_script(task, sky, SKYPILOT_NUM_GPUS_PER_NODE="2")
    assert ran.communicate()[0] == 'it\'s|$HOME `id` \\ "x"|2|a2b 0,1||é|@sae-tui end 0\n'


def run_script(task: dict, sky: Sky, **variables: str) -> subprocess.Popen[str]:
    """Run a task's script as SkyPilot does on a machine; its home folder is a folder of the stub."""
    environment = os.environ | {"HOME": str(sky.home), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables
    script, pipe = local_text(task["run"], sky.home), subprocess.PIPE
    return subprocess.Popen(["bash", "-c", script], env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_machines_train_one_run_and_running_again_resumes_it(sky: Sky) -> None:
    # Both machines share the folder with the runs, as through a bucket.
    task = task_of(job(train={"report_card": False}, gpus="cpu", nodes=2, runs_url="s3://bucket"))
    (port,) = free_ports(1)
    common = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    common |= {"SAE_TUI_PORT": str(port)}

    def outputs() -> list[str]:
        both = [run_script(task, sky, SKYPILOT_NODE_RANK=rank, **common) for rank in ("0", "1")]
        texts = [one.communicate()[0] for one in both]
        assert [one.returncode for one in both] == [0, 0], texts
        return texts

    first, second = outputs()
    assert "finished at step 20/20" in first
    assert "rank 0 of 2" in first
    assert first.rstrip().endswith("@sae-tui end 0")
    assert "@sae-tui" not in second
    assert (sky.home / "sae-tui" / "runs" / "tiny-1" / "sae" / "cfg.json").exists()
    assert '"step":20' in outputs()[0]


@pytest.mark.parametrize("launch", [{}, {"gpus": "cpu"}, {"nodes": 2, "runs_url": "s3://b/c", "spot": True}])
def test_skypilot_itself_accepts_the_task(launch: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky")
    task = sky.Task.from_yaml_config(task_of(job(**launch)))
    assert task.num_nodes == launch.get("nodes", 1)
    assert len(task.resources) == (1 if launch.get("gpus") else len(kinds(task_of(job(**launch)))))

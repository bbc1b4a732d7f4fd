"""Tests for the checks of jobs on rented machines."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.contract.errors import errors
from trainer.contract.settings.backends import check_backend
from trainer.contract.settings.consent import Consent, refused
from trainer.contract.settings.job_file import any_job_of, to_table
from trainer.contract.settings.skypilot import check_rented, parse_kind


def problems(kind: str = "train", **launch: object) -> list[str]:
    table = {"kind": "command", "command": {"argv": ["x"]}} if kind == "command" else {"data": {"path": "acts"}}
    return [str(problem) for problem in check_rented(any_job_of(table | {"launch": {"backend": "skypilot"} | launch}))]


def test_a_gpu_that_no_cloud_has_is_refused_with_the_nearest_name() -> None:
    assert parse_kind("a100-80gb:8") == ("A100-80GB", 8)
    for given, wanted in {"H1000": "H100", "L40T": "L40", "RTX-4090": "RTX4090", "A100-8GB": "A100-80GB"}.items():
        assert problems(gpu_kinds=[given]) == [
            f"launch.gpu_kinds: there is no GPU called {given}; did you mean {wanted}?"
        ]
    assert "use one of T4, V100," in problems(gpu_kinds=["zzz"])[0]
    assert "must be GPUs like H100" in problems(gpu_kinds=["H100 --x"])[0]
    assert "at most 16 GPUs, not 64" in problems(gpu_kinds=["H100:64"])[0]


@pytest.mark.parametrize(
    ("launch", "wanted"),
    [
        ({"gpu_kinds": ["H100:2"], "gpus": "auto:4"}, 'launch.gpu_kinds: H100:2 contradicts launch.gpus = "auto:4"'),
        ({"gpu_kinds": ["H100"], "gpus": "cpu"}, "launch.gpu_kinds: a job on launch.gpus"),
        ({"gpus": [0, 1]}, "launch.gpus: a rented machine has other GPUs"),
        ({"infra": "aws; rm"}, "launch.infra: must be a place"),
        ({"runs_url": "/tmp/runs"}, "launch.runs_url: must be a bucket"),
        ({"runs_url": "s3://a b"}, "launch.runs_url: must be a bucket"),
        ({"nodes": 2}, "launch.runs_url: is missing: several machines share"),
        ({"package": "no.whl"}, "launch.package: there is no wheel no.whl"),
        ({"package": "--index-url=x"}, "launch.package: must be a wheel"),
        ({"python": "/usr/bin/python3"}, "launch.python: a rented machine gets its own Python"),
        ({"spot": True}, "launch.spot: checkpoints are lost with the machine"),
        ({"spot": True, "runs_url": "gs://b"}, None),
        ({"gpu_kinds": ["l40s", "GH200:1"], "infra": "gcp/us-central1", "nodes": 2, "runs_url": "s3://b/c"}, None),
    ],
)
def test_each_wrong_setting_is_named_with_its_fix(launch: dict, wanted: str | None) -> None:
    found = problems(**launch)
    assert [one[: len(wanted or "")] for one in found] == ([wanted] if wanted else [])


def test_a_program_must_say_which_gpus_or_how_much_memory_it_needs() -> None:
    assert problems("command")[0].startswith("launch.gpu_kinds: is missing")
    assert problems("command", gpus="cpu") == problems("command", gpu_kinds=["L4"]) == []


def test_the_backend_needs_the_command_and_warns_about_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    job = any_job_of({"data": {"path": "acts"}, "launch": {"backend": "skypilot", "spot": True, "runs_url": "s3://b"}})
    (missing,) = errors(check_backend(job))
    assert "`pip install skypilot`" in missing.message
    (tmp_path / "sky").touch(mode=0o755)
    (warning,) = check_backend(job)
    assert "set launch.max_restarts" in warning.message


def test_a_package_from_a_job_file_needs_consent() -> None:
    table = to_table(any_job_of({"data": {"path": "acts"}, "launch": {"package": "git+https://x/y"}}))
    (code,) = refused(table, Consent())
    assert code.path == "launch.package"
    assert not refused(table, Consent(to_all=True))

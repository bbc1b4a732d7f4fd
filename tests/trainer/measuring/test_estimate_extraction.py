"""Tests for `estimate` on an extraction job, without loading the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.extractions import extraction_job
from support.tiny_models import D_IN, make_model

from trainer.cli import main
from trainer.contract.planning.hardware import CPU, DeviceSpeeds, MeasuredHardware, write_box
from trainer.contract.settings.job_file import dump_job


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAE_TUI_DATA_DIR", str(tmp_path))
    (tmp_path / "corpus.txt").write_text("the cat sat")
    job = extraction_job(make_model(tmp_path / "llama", "llama"), tmp_path / "corpus.txt", tmp_path / "rows")
    (file := tmp_path / "job.toml").write_text(dump_job(job))
    return file


def test_memory_parts_add_up_and_disk_space_and_time_and_rate_are_reported(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["estimate", str(job_file), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    total = told["per_gpu"].pop("total")
    assert total == sum(told["per_gpu"].values())
    assert told["per_gpu"]["weights"] > 0
    assert told["disk_bytes"] == 300 * 2 * (4 * D_IN + 20)
    assert told["disk_free_bytes"] > told["disk_bytes"]
    assert told["tokens_per_s"] * told["seconds"] == pytest.approx(300)
    assert (told["mode"], told["device"], told["is_measured"]) == ("single", CPU, False)
    assert main(["estimate", str(job_file)]) == 0
    head, *table, disk, time = capsys.readouterr().out.splitlines()
    assert head == "per process, on 1:"
    assert any(line.split()[:2] == ["W", "weights"] for line in table)
    assert disk.startswith("300 rows of each hook take ")
    assert disk.endswith(" GiB free")
    assert time.endswith(" by assumed speeds of a typical CPU process")
    write_box(tmp_path / "box.json", MeasuredHardware(devices={CPU: DeviceSpeeds({"fp32": 1e6}, 1e9)}))
    assert main(["estimate", str(job_file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(" by speeds measured here")


def test_missing_gpus_are_assumed_to_be_typical_ones(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate", str(job_file), "--set", "launch.gpus=auto:2"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("per GPU, on 2:\n")


def test_the_error_for_a_model_that_is_not_on_disk_names_it(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(job_file), "--set", "model.path=someone/some-model"]) == 2
    assert capsys.readouterr().err.startswith("model.path: someone/some-model was not found on this machine")

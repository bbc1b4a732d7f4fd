"""Tests for `sae-tui task` and `sae-tui down`, with a stub of SkyPilot's command."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.sky import Sky

from sae_tui.cli import main
from sae_tui.jobs.launchers.skypilot import Rented
from trainer.contract.json_file import write_json
from trainer.contract.paths import DataDir
from trainer.contract.settings.job_file import dump_job, job_of
from trainer.contract.store.job_store import Control
from trainer.contract.store.rows import Job
from trainer.contract.store.states import JobState


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.toml"
    table = {"data": {"source": "synthetic", "d_in": 8}, "sae": {"d_sae": 16, "k": 4}, "train": {"n_steps": 5}}
    file.write_text(dump_job(job_of(table)))
    return file


def test_task_prints_yaml_alone_and_warnings_elsewhere(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task", str(job_file), "--gpus", "L4:1,h100", "--spot", "--runs", "gs://b", "--infra", "gcp"]) == 0
    printed = capsys.readouterr()
    task = yaml.safe_load(printed.out)
    assert [one["accelerators"] for one in task["resources"]["any_of"]] == ["L4:1", "H100:1"]
    assert task["resources"]["use_spot"] is True
    assert task["file_mounts"]["~/sae-tui/runs"]["source"] == "gs://b"
    assert main(["task", str(job_file), "--no-spot", "--gpus", "cpu"]) == 0
    assert "use_spot" not in yaml.safe_load(capsys.readouterr().out)["resources"]


def test_task_names_the_flag_that_is_wrong(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["task", str(job_file), "--gpus", "H1000"]) == 2
    assert capsys.readouterr() == ("", "sae-tui: error: --gpus: there is no GPU called H1000; did you mean H100?\n")
    assert main(["task", str(job_file), "--nodes", "2"]) == 1
    assert "launch.runs_url: is missing" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["task", "validate", "launch"])
def test_a_job_that_fits_on_no_gpu_is_refused_at_once(
    command: str, tmp_path: Path, job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sky = Sky(tmp_path / "sky", monkeypatch)
    flags = ["--set", "launch.backend=skypilot", "--set", "sae.d_sae=40000000", "--set", "data.d_in=4096"]
    code = main(["--data-dir", str(tmp_path / "data"), command, str(job_file), *flags])
    assert code in (1, 2)
    shown = "".join(capsys.readouterr())
    assert "launch.gpu_kinds: the job needs" in shown
    assert "and B200 has 180 GiB" in shown
    assert not sky.asked("launch")


def test_down_shows_what_is_lost_and_the_cost_and_asks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sky, data = Sky(tmp_path / "sky", monkeypatch), DataDir(tmp_path / "data")
    data.create()
    control = Control(data.control_db)
    row = Job(name="tiny", config="", user="ada", host="box", device="cpu", gpu_source="none", backend="skypilot")
    job_id = control.create_job(row)
    down = ["--data-dir", str(data.root), "down", str(job_id)]
    assert main(down) == 1
    assert f"job {job_id} has no rented machine" in capsys.readouterr().err
    control.transition(job_id, JobState.STARTING, attempt=1)
    control.transition(job_id, JobState.FAILED)
    control.close()
    (folder := data.run(job_id).attempt(1)).mkdir(parents=True)
    write_json(folder / "rented.json", Rented("tiny-1", 1))
    (sky.folder / "machine.json").write_text('{"name": "tiny-1"}')
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    asked: list[str] = []
    monkeypatch.setattr("builtins.input", lambda question: asked.append(question) or "n")
    assert main(down) == 1
    assert asked == [
        f"End the machine tiny-1? Job {job_id} is failed; files that were not copied from the machine are lost."
        " Cost: $1.23 so far, by SkyPilot's estimate. [y/N] "
    ]
    assert not sky.asked("down")
    sky.fault("down", 1, "Connection refused")
    assert main([*down, "--yes"]) == 1
    assert "tiny-1 was not ended: SkyPilot cannot reach its server" in capsys.readouterr().err
    sky.fault("down", 0)
    assert main([*down, "--yes"]) == 0
    assert sky.asked("down")[-1] == ["--yes", "tiny-1"]
    assert main([*down, "--yes"]) == 0
    assert "tiny-1 was already gone; cost: unknown" in capsys.readouterr().out

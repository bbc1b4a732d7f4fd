"""Tests that a stream of activations can be selected, reviewed and checked like other data, although it has no
length.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.toy_stream import ENTRY

from sae_tui.cli import main
from sae_tui.jobs.launch import job_form
from sae_tui.jobs.launch.ways import job_rows
from trainer.contract.paths import DataDir
from trainer.contract.planning.hardware import MeasuredHardware
from trainer.contract.settings import catalog
from trainer.contract.settings.job_file import dump_job, parse_job

VALUES: dict[str, Any] = {"data.source": "toy", "data.d_in": 64, "train.n_tokens": 10**6, "launch.gpus": "cpu"}


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(catalog.SOURCES, "toy", ENTRY)


def review(data: DataDir, **changes: Any) -> job_form.Review:
    values = {path: value for path, value in (VALUES | changes).items() if value is not None}
    return job_form.review(job_form.Draft(values, {}, "cpu"), [], data, [], cuda=False)


def test_the_form_shows_the_settings_of_the_chosen_stream_and_of_all_streams() -> None:
    fields = {path: choices for path, _, choices in job_form.form_fields({"data.source": "toy"})}
    assert "toy" in fields["data.source"]
    assert {"data.shuffle_tokens", "data.ends_after", "data.held_out_tokens"} <= fields.keys()
    assert "data.shuffle_tokens" not in {path for path, *_ in job_form.form_fields({"data.source": "shards"})}


def test_the_forecast_for_a_stream_uses_the_training_token_count(tmp_path: Path) -> None:
    reviewed = review(DataDir(tmp_path))
    assert reviewed.job is not None
    assert not reviewed.problems
    assert re.search(r"effective batch 1984 .* about \d+ s, estimated", reviewed.summary)
    longer = review(DataDir(tmp_path), **{"train.n_tokens": 10**8})
    assert re.search(r"about [\d.]+ (min|h)", longer.summary)
    assert job_rows(reviewed.job, reviewed.job.data_shape(), [], MeasuredHardware(), cuda=False)


def test_a_missing_token_count_and_a_bad_shuffle_size_are_reported_in_their_fields(tmp_path: Path) -> None:
    assert review(DataDir(tmp_path), **{"train.n_tokens": None}).by_field.keys() == {"train.n_tokens"}
    assert review(DataDir(tmp_path), **{"data.shuffle_tokens": 0}).by_field.keys() == {"data.shuffle_tokens"}


def test_commands_accept_a_job_that_trains_on_a_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, _ = parse_job({"data": {"source": "toy"}, "train": {"n_steps": 100}, "launch": {"gpus": "cpu"}})
    assert job is not None
    (tmp_path / "job.toml").write_text(dump_job(job))
    for command, key in (("validate", "valid"), ("recommend", "gpus")):
        arguments = ["--demo", "--data-dir", str(tmp_path / "data"), command, str(tmp_path / "job.toml"), "--json"]
        assert main(arguments) == 0
        assert json.loads(capsys.readouterr().out)[key]

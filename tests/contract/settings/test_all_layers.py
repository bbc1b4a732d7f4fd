"""Tests for hooks without a layer (which select all layers), for layer ranges, and for full MLPs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sae_tui.jobs.launch import job_form
from trainer.contract.errors import JobFileError
from trainer.contract.paths import DataDir
from trainer.contract.settings.extract import ExtractJob
from trainer.contract.settings.job_file import load_job, parse_as, parse_job


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write the files of a three-block model."""
    folder = tmp_path / "model"
    folder.mkdir()
    weights = json.dumps({"w": {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}}).encode()
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, "num_hidden_layers": 3}))
    (folder / "model.safetensors").write_bytes(len(weights).to_bytes(8, "little") + weights + bytes(256))
    (tmp_path / "text.txt").write_text("a cat sat")
    return folder


def stored(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir(parents=True)
        np.save(folder / name / "a.npy", np.zeros((400, 8), np.float32))
    return folder


def hooks_of(data: dict[str, Any]) -> list[str]:
    job, problems = parse_job({"data": data, "train": {"n_steps": 5}})
    assert job, problems
    return list(job.hooks)


def test_a_hook_without_a_layer_means_all_layers_of_the_model(model: Path) -> None:
    data = {"source": "model", "model": str(model), "text": str(model.parent / "text.txt")}
    assert hooks_of(data | {"hook": "mlp"}) == ["mlp.0", "mlp.1", "mlp.2"]
    assert hooks_of(data | {"hook": ["resid_post", "attn_out.1"]}) == [
        "resid_post.0", "resid_post.1", "resid_post.2", "attn_out.1",
    ]  # fmt: skip
    job, _ = parse_job({"data": data | {"hook": "mlp"}, "train": {"n_steps": 5}})
    assert job is not None
    assert job.data_shape().d_out == 8


def test_a_hook_without_a_layer_means_all_layers_with_stored_rows(tmp_path: Path) -> None:
    rows = stored(tmp_path / "rows", "mlp_in.0", "mlp_out.0", "blocks.2.mlp.hook_in", "mlp_out.2", "mlp_in.1", "notes")
    assert hooks_of({"path": str(rows), "hook": "mlp"}) == ["mlp.0", "mlp.2"]
    assert hooks_of({"path": str(rows), "hook": "mlp_in"}) == ["mlp_in.0", "mlp_in.1", "mlp_in.2"]
    assert hooks_of({"path": str(stored(tmp_path / "one", "resid_pre.7")), "hook": "resid_pre"}) == [""]
    more = stored(tmp_path / "more", "mlp_in.2", "mlp_out.2", "mlp_in.5", "mlp_out.5")
    job, _ = parse_job({"data": {"path": [str(rows), str(more)], "hook": "mlp"}})
    assert job is not None
    assert job.data.settings.hook == "mlp.2"  # type: ignore[attr-defined]


def test_layers_are_found_in_folders_next_to_the_job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path / "rows", "mlp_in.0", "mlp_out.0", "mlp_in.1", "mlp_out.1")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "job.toml").write_text('[data]\npath = "rows"\nhook = "mlp"')
    assert list(load_job("../job.toml").hooks) == ["mlp.0", "mlp.1"]


@pytest.mark.parametrize("source", ["shards", "model"])
def test_an_unknown_number_of_layers_is_refused(source: str, tmp_path: Path) -> None:
    of_model = {"model": "some/model-of-the-hub", "text": str(tmp_path), "source": "model", "d_in": 8}
    data: dict[str, Any] = {"path": str(tmp_path)} if source == "shards" else of_model
    job, _ = parse_job({"data": data | {"hook": "mlp"}, "train": {"n_steps": 5}})
    assert job is not None
    with pytest.raises(JobFileError) as error:
        job.data_shape()
    assert str(error.value.problems[0]) == (
        'data.hook: "mlp" stands for all layers, but the number of layers is not known here; list them, like mlp.0-11'
    )


def test_an_extraction_accepts_ranges_and_full_mlps_and_all_layers(model: Path) -> None:
    def extracted(*hooks: str) -> list[str]:
        table = {"model": {"path": str(model), "hooks": [*hooks]}, "text": {"path": "text"}}
        job, problems = parse_as(ExtractJob, {"kind": "extract", **table})
        assert job, problems
        return job.model.hooks

    assert extracted("resid_post.0-2", "attn_out.1") == [
        "resid_post.0", "resid_post.1", "resid_post.2", "attn_out.1",
    ]  # fmt: skip
    assert extracted("mlp.1") == ["mlp_in.1", "mlp_out.1"]
    assert extracted("mlp.0-1") == ["mlp_in.0", "mlp_out.0", "mlp_in.1", "mlp_out.1"]
    assert extracted("mlp") == ["mlp_in.0", "mlp_out.0", "mlp_in.1", "mlp_out.1", "mlp_in.2", "mlp_out.2"]
    assert extracted("h.3.attn") == ["h.3.attn"]
    table = {"model": {"path": "some/model", "hooks": ["mlp"]}, "text": {"path": "text"}}
    _, (problem,) = parse_as(ExtractJob, {"kind": "extract", **table})
    assert problem.path == "model.hooks"
    assert "list them, like mlp.0-11" in problem.message


def test_the_launch_screen_accepts_ranges_and_full_mlps(model: Path, tmp_path: Path) -> None:
    (setting,) = (one for path, one, _ in job_form.form_fields({"kind": "extract"}) if path == "model.hooks")
    values = {
        "kind": "extract", "model.path": str(model), "model.hooks": setting.parse("mlp.0-1, resid_post"),
        "text.path": str(tmp_path / "text.txt"), "extract.output": str(tmp_path / "rows"),
    }  # fmt: skip
    reviewed = job_form.review(job_form.Draft(values, {}, "cpu"), [], DataDir(tmp_path), [], cuda=False)
    assert isinstance(reviewed.job, ExtractJob)
    assert reviewed.job.model.hooks == [
        "mlp_in.0", "mlp_out.0", "mlp_in.1", "mlp_out.1", "resid_post.0", "resid_post.1", "resid_post.2",
    ]  # fmt: skip

"""Tests for the registry of launch backends: one file and one entry define a backend."""

from __future__ import annotations

import functools
import json
import os
import sys

import pytest
from support import toy_backend

from sae_tui.cli import main
from sae_tui.jobs import detach
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.job_form import form_fields
from sae_tui.jobs.launch.placement import Placement
from sae_tui.jobs.launch.summary import summary
from sae_tui.jobs.launchers.base import Attempt
from trainer.contract.settings.catalog import LAUNCH_BACKENDS
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.states import JobState


@pytest.fixture
def nice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LAUNCH_BACKENDS, "nice", toy_backend.ENTRY)


@pytest.mark.parametrize("backend", LAUNCH_BACKENDS)
def test_every_backend_implements_the_attempt_interface(backend):
    loaded = LAUNCH_BACKENDS[backend].load()
    wanted = {member for member in vars(Attempt) if not member.startswith("_")}
    assert wanted
    assert not [member for member in wanted if not hasattr(loaded, member)]


@pytest.mark.timeout(200)
def test_a_registered_backend_runs_a_real_training_job(box, nice):
    start = functools.partial(detach.start, command=[sys.executable, "-P", toy_backend.__file__])
    where = Placement("cpu", (), 1)
    config = box.config(backend="nice", niceness=7)
    job_id = launching.launch(box.data, config, where, gpu_source="none", start=start)
    job = box.wait_ended(job_id, timeout_s=120.0)
    assert (job.state, job.error, job.step) == (JobState.FINISHED, None, 10)
    assert job.backend == "nice"
    assert box.data.run(job_id).log(0).read_text().startswith(f"niceness {7 + os.nice(0)}\n")
    settings, _ = summary(job.config)
    assert {("backend", "nice"), ("niceness", "7")} <= set(settings)


def test_the_form_offers_a_registered_backend_and_shows_its_settings(nice):
    choices = {path: choices for path, _, choices in form_fields({})}
    assert choices["launch.backend"] == ("local", "slurm", "skypilot", "nice")
    more = {path for path, _, _ in form_fields({"launch.backend": "nice"})}
    assert more - choices.keys() == {"launch.niceness"}


@pytest.mark.parametrize(("gpus", "n_warnings"), [("cpu", 0), ("auto", 1)])
def test_validate_runs_the_checks_of_a_registered_backend(box, nice, tmp_path, capsys, gpus, n_warnings):
    file = tmp_path / "job.toml"
    file.write_text(dump_job(box.config(backend="nice", gpus=gpus)))
    code = main(["--data-dir", str(box.data.root), "--gpu-source", "none", "validate", str(file), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (code, answer["valid"]) == (0, True)
    assert sum("lowers only the CPU priority" in str(warning) for warning in answer["warnings"]) == n_warnings

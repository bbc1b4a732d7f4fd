"""Tests for the registry of job kinds: one file and one entry define a kind."""

from __future__ import annotations

import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest
from support import toy_kind
from support.toy_kind import ToyJob, ToySettings

from sae_tui.cli import main
from sae_tui.jobs import detach
from sae_tui.jobs.launch import job_form, launching
from sae_tui.jobs.launch.clone import clone_settings
from sae_tui.jobs.launch.kinds import launch_kind
from sae_tui.jobs.launch.placement import place, propose_here
from sae_tui.jobs.launch.summary import summary
from sae_tui.jobs.supervisor.attempt import AttemptRunner
from trainer.contract.errors import JobFileError
from trainer.contract.planning import check_job
from trainer.contract.planning.check_job import Machine, check, proposal_class
from trainer.contract.settings.catalog import KINDS
from trainer.contract.settings.job import Launch
from trainer.contract.settings.job_file import dump_job, load_any, load_job, parse_any
from trainer.contract.settings.sections import find_setting, job_class
from trainer.contract.store.states import JobState
from trainer.ranks.rank import RankWork


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyJob:
    """Register the example job kind, and return a job of this kind."""
    monkeypatch.setitem(KINDS, "toy", toy_kind.ENTRY)
    return ToyJob(toy=ToySettings(line=["true"], times=3), launch=Launch(gpus="cpu"), name="make")


def values_of(job: ToyJob) -> dict[str, Any]:
    return {"kind": "toy", "name": job.name, "toy.line": job.toy.line, "toy.times": job.toy.times}


@pytest.mark.parametrize("kind", KINDS)
def test_every_job_kind_defines_its_proposal_estimate_rank_work_and_launch_form(kind: str) -> None:
    assert job_class(kind).kind == kind
    assert issubclass(pkgutil.resolve_name(KINDS[kind].proposal), check_job.Proposal)
    assert issubclass(pkgutil.resolve_name(KINDS[kind].runner), AttemptRunner)
    if job_class(kind).needs_trainer:
        assert issubclass(pkgutil.resolve_name(KINDS[kind].rank), RankWork)
        assert callable(pkgutil.resolve_name(KINDS[kind].estimate))
    assert launch_kind(kind).heading != "Settings"


def test_a_job_file_of_a_registered_kind_is_read_and_written(toy: ToyJob, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(dump_job(toy))
    assert file.read_text().startswith('kind = "toy"\nname = "make"\n\n[toy]\n')
    assert load_any(file) == toy
    assert load_any(file, ["toy.times=7", "launch.gpus=cpu:2"]) == toy.replace("toy", times=7).replace(
        "launch", gpus="cpu:2"
    )
    assert find_setting("toy.times")
    wrong = parse_any({"kind": "toy", "toy": {"line": [], "tines": 1}})[1]
    assert [str(problem) for problem in wrong] == [
        'toy.tines: is not a known setting; did you mean "times"?', "toy.line: is empty; give a command",
    ]  # fmt: skip
    with pytest.raises(JobFileError, match='kind: is "toy" and not "train"; run it with `sae-tui launch`'):
        load_job(file)


def test_a_registered_kind_is_checked_and_placed(toy: ToyJob, box) -> None:
    machine = Machine((), 2, box.data.root)
    assert check(toy, machine) == []
    assert [str(problem) for problem in check(toy.replace("toy", times=101), machine)] == ["toy.times: is large"]
    (missing,) = check(toy.replace("launch", gpus=[0]), machine)
    assert missing.message == "there is no GPU 0 here; this machine has none"
    proposal = propose_here(toy.replace("launch", gpus="cpu:2"), [], box.data, cuda=False)
    where = place(proposal, [])
    assert (where.device, where.world_size, where.look) == ("cpu", 2, proposal.outlook)
    assert (proposal.outlook.mode, proposal.outlook.needs_bytes) == ("single", None)
    assert proposal_class(toy).total_steps(toy, 2) == 3


def test_the_form_shows_and_reviews_a_registered_kind(toy: ToyJob, box) -> None:
    fields = {path: setting for path, setting, _ in job_form.form_fields(values_of(toy))}
    assert {"name", "toy.line", "toy.times", "launch.backend"} < fields.keys()
    assert not [path for path in fields if path.startswith(("sae.", "train.", "data."))]
    review = job_form.review(job_form.Draft(values_of(toy), {}, "cpu"), [], box.data, [], cuda=False)
    assert (review.job, review.errors) == (toy, [])
    assert review.summary == "1 CPU process · memory unknown"
    assert launch_kind("toy").heading == "Toy"


@pytest.mark.timeout(200)
def test_a_registered_kind_is_launched_and_listed(toy: ToyJob, box, tmp_path, capsys, monkeypatch) -> None:
    command = [sys.executable, "-P", toy_kind.__file__]
    monkeypatch.setattr(launching, "enqueue", lambda data: detach.start(data, data.last_id(), command) or "")
    file = tmp_path / "job.toml"
    file.write_text(dump_job(toy))

    def run(*argv: object) -> Any:
        code = main(["--data-dir", str(box.data.root), "--gpu-source", "none", *map(str, argv), "--json"])
        assert code == 0
        return json.loads(capsys.readouterr().out)

    assert run("validate", file)["valid"]
    job_id = run("launch", file)["id"]
    job = box.wait_ended(job_id, timeout_s=120.0)
    assert (job.state, job.error, job.step, job.total_steps) == (JobState.FINISHED, None, 3, 3)
    (listed,) = run("jobs")
    assert (listed["name"], listed["state"], listed["step"], listed["mode"]) == ("make", "finished", 3, "single")
    assert clone_settings(box.data, job_id) == toy
    assert ("times", "3") in summary(job.config)[0]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record calls to `wanted_devices` from every module; return the list that collects the jobs passed to it."""
    jobs: list[Any] = []
    original = check_job.wanted_devices

    def count(job: Any) -> int:
        jobs.append(job)
        return original(job)

    for module in list(sys.modules.values()):
        if vars(module).get("wanted_devices") is original:
            monkeypatch.setattr(module, "wanted_devices", count)
    return jobs


def test_a_review_determines_a_jobs_devices_only_once(box, tmp_path, capsys, monkeypatch) -> None:
    jobs = counted(monkeypatch)
    config = box.config(gpus="cpu:2")
    values = job_form.flatten(job_form.job_file.to_table(config))
    reviewed = job_form.review(job_form.Draft(values, {}, "cpu:2"), [], box.data, [], cuda=False)
    assert reviewed.job
    assert job_form.overridden(values | {"train.n_steps": 5}, reviewed)
    assert len(jobs) == 1
    jobs.clear()
    file = tmp_path / "job.toml"
    file.write_text(dump_job(config))
    main(["--data-dir", str(box.data.root), "--gpu-source", "none", "validate", str(file), "--json"])
    assert json.loads(capsys.readouterr().out)["valid"]
    assert len(jobs) == 1

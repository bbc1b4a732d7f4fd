"""Tests for another environment's Python: what it reports, and when sae-tui must refuse to run it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import torch
from support.environments import TORCH, answer, answering, make_environment, stand_in

from sae_tui.jobs import environment, named_python
from sae_tui.jobs.environment import Environment, glance, look
from sae_tui.jobs.evaluation import request
from sae_tui.jobs.launch import launching
from sae_tui.jobs.launch.clone import clone_settings
from sae_tui.jobs.launchers.sbatch import script
from tests.jobs.conftest import Box
from trainer.contract.errors import JobFileError, UserError
from trainer.contract.files import write_own
from trainer.contract.planning.torch_build import installed_build
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.job_file import dump_job

OWN = version("sae-tui")
INSTALL = "-m pip install 'sae-tui[train]'`"


@pytest.fixture(scope="module")
def trains(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("elsewhere") / "env")


def test_an_environment_reports_its_versions_and_is_read_only_once(
    trains: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With this variable set, the other Python would fail to start.
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    there = look(str(trains))
    assert there.lack() == ""
    python = ".".join(map(str, sys.version_info[:3]))
    assert there.words == f"Python {python}, sae-tui {OWN}, {there.answer.torch.words}"
    assert there.answer.torch.version == torch.__version__
    assert look(str(trains)) is there
    assert len((trains.parents[2] / "starts").read_text().splitlines()) == 1


def test_an_environment_without_a_trainer_gets_an_install_command(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "bare", trains=False)
    assert look(str(python)).lack() == f"{python} has no trainer; run `{python} {INSTALL}"


def test_neither_a_local_trainer_folder_nor_the_apps_packages_are_imported(
    trains: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "__init__.py").write_text("raise SystemExit('taken from here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    argv = named_python.command(str(trains), "-c", "import sys, trainer; print(sys.prefix, trainer.__file__)")
    options = {"cwd": tmp_path, "env": named_python.variables(str(trains)), "capture_output": True, "text": True}
    prefix, file = subprocess.run(argv, **options, check=True).stdout.split()
    assert prefix == str(trains.parents[1])
    assert Path(file).parents[1] == Path(environment.__file__).parents[2]
    assert named_python.command("", "eval")[0] == sys.executable
    assert named_python.variables("")["PYTHONPATH"] == str(tmp_path)


def test_an_environment_is_read_again_if_it_or_a_package_folder_has_changed(tmp_path: Path) -> None:
    (packages := tmp_path / "packages").mkdir()
    python = answering(tmp_path, answer(paths=[str(packages)], trainer=None))
    assert "has no trainer" in look(str(python)).lack()
    answering(tmp_path, answer(paths=[str(packages)]))
    for change in (lambda: (packages / "sae_tui.dist-info").touch(), lambda: os.utime(python, (1, 1))):
        change()
        for _ in range(2):
            assert look(str(python)).lack() == ""
    # Rewriting the fake Python was a change too, but the environment was not queried between it and the next change.
    assert (tmp_path / "asked").read_text().split() == ["asked"] * 3


HOSTILE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"version": [3, 9, 2]}, "is Python 3.9.2, and the trainer needs 3.11 or newer"),
        ({"trainer": "0.1.7"}, f"its trainer is sae-tui 0.1.7, but the app is sae-tui {OWN}; run `"),
        ({"trainer": "99.0"}, f"its trainer is sae-tui 99.0, but the app is sae-tui {OWN}; upgrade the app, or run `"),
        ({"trainer_error": f"No module {HOSTILE}"}, "its trainer cannot be imported: No module �]0;owned�; run `"),
        ({"packages": ["numpy"], "torch": None}, "lacks torch and safetensors; run `"),
        ({"torch": None, "torch_error": "libcudart.so.12"}, "its torch cannot be imported: libcudart.so.12; run `"),
        ({"settings": {}}, None),
    ],
)
def test_a_problem_with_an_environment_is_reported_in_one_sentence_with_a_remedy(
    tmp_path: Path, box: Box, told: dict, sentence: str | None
) -> None:
    python = answering(tmp_path, answer(**told))
    there = look(str(python))
    if sentence:
        assert sentence in there.lack()
        assert "\x1b" not in there.lack() + there.words
    (problem,) = there.problems(box.config())
    assert problem.path == "launch.python"
    assert problem.message.startswith(there.lack() or f"its trainer, sae-tui {OWN}, does not know data.source, ")


def test_a_setting_unknown_to_the_other_trainer_is_reported(tmp_path: Path, box: Box) -> None:
    known = dict(answer()["settings"])
    del known["train.deterministic"]
    known["sae.architecture"] = ["jumprelu"]
    there = look(str(answering(tmp_path, answer(settings=known))))
    (problem,) = there.problems(box.config())
    unknown = 'does not know sae.architecture = "topk" and train.deterministic; run `'
    assert unknown in problem.message


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("exit 3", "exited with code 3; name the Python"),
        ("echo oh no >&2; exit 3", "exited with code 3, saying oh no; name the Python"),
        (r"printf '\033]0;owned\007{'", "did not return valid JSON, saying �]0;owned�{; name"),
        ("exec sleep 100", "did not respond within 0.5 s"),
    ],
)
def test_a_python_that_fails_or_hangs_is_abandoned_and_the_reason_is_reported(
    tmp_path: Path, body: str, sentence: str
) -> None:
    python = stand_in(tmp_path, body)
    limit_s = 0.5 if "sleep" in body else 30.0
    lack = look(str(python), limit_s).lack()
    assert lack.startswith(f"{python} ")
    assert sentence in lack


def test_a_path_that_is_not_a_python_is_not_run(tmp_path: Path) -> None:
    env = answering(tmp_path / "env").parents[1]
    (plain := tmp_path / "python").write_text("")
    (other := stand_in(tmp_path, f"touch {tmp_path}/was-run", "ruin"))
    for path, sentence in (
        (tmp_path / "gone" / "python", f"{tmp_path}/gone/python does not exist; name another Python"),
        (plain / "python", f"{plain}/python does not exist; name another Python"),
        (env, f"{env} is a folder; name the Python interpreter in it, {env}/bin/python"),
        (plain, f"{plain} is not executable; `chmod u+x` it"),
        ("env/bin/python", 'takes the absolute path of a Python, like "/home/me/env/bin/python", not "env/bin/python"'),
        (f"{env}/bin/\x1b[2Jpython", "takes the absolute path of a Python"),
        (other, "takes a program whose name starts with python"),
    ):
        assert look(str(path)).lack().startswith(sentence)
        assert "\x1b" not in look(str(path)).lack()
    assert not (tmp_path / "was-run").exists()
    assert not (env / "asked").exists()


def test_a_tilde_in_the_path_stands_for_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    answering(tmp_path / "env")
    assert look("~/env/bin/python").lack() == ""


@pytest.mark.parametrize("exposed", [".", "bin", "bin/python", "link"])
def test_a_python_that_other_users_may_change_is_not_run(tmp_path: Path, exposed: str) -> None:
    env = answering(tmp_path / "env").parents[1]
    (env / "bin" / "python3").symlink_to("../bin/../bin/python")
    (open_to_all := tmp_path / "open").mkdir()
    (open_to_all / "link").symlink_to(env)
    named = (open_to_all / "link" if exposed == "link" else env) / "bin" / "python3"
    place = open_to_all if exposed == "link" else env / exposed
    place.chmod(0o777)
    assert look(str(named)).lack() == f"refusing to run {named}: others may write to {place}; `chmod go-w` it"
    assert not (env / "asked").exists()
    place.chmod(0o755)
    assert look(str(named)).lack() == ""


def test_an_environment_is_read_in_the_background_and_the_caller_is_notified(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    python = stand_in(tmp_path, f"read line < {tmp_path}/gate; cat {tmp_path}/answer.json")
    (tmp_path / "answer.json").write_bytes(msgspec.json.encode(answer()))
    known = threading.Event()
    there = glance(str(python), known.set)
    assert there.is_asked
    assert there.lack() == f"{python} is being checked; wait a moment"
    (tmp_path / "gate").write_text("\n")
    assert known.wait(30)
    assert glance(str(python), known.set).lack() == ""


def test_jobs_are_checked_against_the_packages_in_the_other_environment(tmp_path: Path, box: Box) -> None:
    cuda = TORCH | {"version": "2.9.0+cu128", "cuda": "12.8", "gpus": 0}
    python = str(answering(tmp_path, answer(torch=cuda)))
    job = launching.with_whole_python(box.config().replace("train", mirror="wandb"), python)
    with environment.judged_there(job, wants_gpus=True) as (problem,):
        assert installed_build() == ("2.9.0+cu128", "cuda")
    assert problem.severity == "warning"
    assert problem.message.startswith("its torch 2.9.0+cu128 sees no GPU here; see `")
    assert installed_build().version == torch.__version__
    with pytest.raises(JobFileError, match="wandb is not installed"):
        launching.launch(box.data, job, box.placement(), gpu_source="none")
    # Unknown packages cause no error.
    assert Environment("/x/python", failure="gone").packages.names is None


def test_a_cloned_job_keeps_its_python_unless_other_users_may_change_its_job_file(tmp_path: Path, box: Box) -> None:
    python = str(answering(tmp_path / "env"))
    job = launching.with_whole_python(box.config(), python)
    assert launching.with_whole_python(box.config(python=""), python).launch.python == ""
    job_id = box.record()
    box.data.run(job_id).create()
    file = box.data.run(job_id).job_file
    write_own(file, dump_job(job))
    assert clone_settings(box.data, job_id).launch.python == python
    assert request.python_of(box.data, job_id) == python
    file.chmod(0o660)
    with pytest.raises(
        JobFileError, match=r"launch.python: is not taken from a file, only from --set, because others may"
    ):
        clone_settings(box.data, job_id)
    with pytest.raises(UserError, match=f"refusing to run the Python interpreter of job {job_id}: others may write"):
        request.python_of(box.data, job_id)
    assert clone_settings(box.data, job_id, ["launch.python="]).launch.python is None


def test_a_batch_script_runs_ranks_with_the_chosen_python_and_without_the_apps_packages(
    tmp_path: Path, box: Box
) -> None:
    spec = RankSpec(tmp_path, tmp_path, attempt=1, world_size=1, device="cpu")
    launch = box.config(python="/env/bin/python").launch
    assert "\nunset PYTHONPATH PYTHONHOME " in script(spec, launch, ["rank"])
    assert "unset" not in script(spec, box.config().launch, ["rank"])


def test_a_job_whose_python_is_missing_fails_with_a_message_that_names_the_path(tmp_path: Path, box: Box) -> None:
    python = answering(tmp_path / "env")
    job_id = box.launch("steps=3", python=str(python), place={"hold": True})
    assert f'python = "{python}"' in box.data.run(job_id).job_file.read_text()
    python.unlink()
    box.control.update(job_id, held=False)
    job = box.wait_ended(job_id)
    assert job.error == f"{python} does not exist; name another Python, or none to use the app's own"


def test_a_folder_that_others_can_add_files_to_is_rejected_at_both_ends_of_a_link(tmp_path: Path) -> None:
    base = stand_in(tmp_path / "base", "exit 1", "python3")
    (named := tmp_path / "bin" / "python").parent.mkdir()
    named.symlink_to(base)
    assert named_python.refusal(str(named)) == ""
    # As in /tmp, other users cannot replace the files in these folders but can add new ones.
    for folder in (named.parent, base.parent):
        folder.chmod(0o1777)
        with pytest.raises(UserError, match=f"refusing to run {named}: others may write to {folder}; `chmod go-w` it"):
            named_python.refuse(str(named))
        folder.chmod(0o755)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_another_users_python_is_rejected(tmp_path: Path) -> None:
    python = stand_in(tmp_path / "bin", "exit 1")
    os.chown(python, 12345, -1)
    assert (
        named_python.refusal(str(python))
        == f"refusing to run {python}: {python} belongs to uid 12345; name one of your own"
    )

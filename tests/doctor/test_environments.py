"""Tests for the doctor's findings about the app's and the trainer's environments."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from support.environments import TORCH, answer, answering, stand_in

from sae_tui.doctor.base import CheckedMachine
from sae_tui.doctor.environments import both, check_environments, check_trainer_code
from sae_tui.doctor.torch_build import check_torch
from sae_tui.gpu.none import NoGpus
from trainer.contract import exits
from trainer.contract.paths import DataDir

OWN = version("sae-tui")


def box_of(tmp_path: Path, python: str = "") -> CheckedMachine:
    return CheckedMachine(DataDir(tmp_path / "data"), NoGpus(), root=tmp_path, python=python)


def test_both_environments_are_reported_with_the_trainers_torch(tmp_path: Path) -> None:
    python = str(answering(tmp_path / "env"))
    box = box_of(tmp_path, python)
    app, trainer = check_environments(box)
    assert (app.level, app.sentence) == ("ok", f"Python {platform.python_version()}, sae-tui {OWN}")
    words = f"Python 3.12.1, sae-tui {OWN}, torch 2.9.0+cpu, built without CUDA"
    assert (trainer.level, trainer.sentence) == ("ok", f"{words}: {python}")
    assert both(box)["app"]["python"] == sys.executable
    assert both(box)["trainer"]["torch"] == "2.9.0+cpu"
    build = TORCH | {"available": False, "archs": [], "nccl": None, "nccl_installed": None, "triton": None}
    (tmp_path / "env" / "answer.json").write_text(json.dumps(build))
    (torch,) = check_torch(box)
    assert torch.sentence == "2.9.0+cpu, built without CUDA; jobs run on the CPU here"


def test_doctor_names_the_imported_trainer_and_a_local_file_that_hides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = Path(exits.__file__).parents[1]
    (imported,) = check_trainer_code(box_of(tmp_path))
    assert (imported.level, imported.sentence) == ("ok", f"`import trainer` finds {ours}, which belongs to sae-tui")
    (tmp_path / "trainer.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "site" / "trainer-0.0.36.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "trainer-0.0.36.dist-info" / "METADATA").write_text("Name: trainer\nVersion: 0.0.36\n")
    (tmp_path / "site" / "trainer-0.0.36.dist-info" / "top_level.txt").write_text("trainer\n")
    other, here = check_trainer_code(box_of(tmp_path))
    assert (other.level, here.level) == ("warning", "note")
    assert other.sentence.startswith(f"{ours} also contains files from trainer")
    assert here.sentence == f"in this folder `python -m trainer` runs {tmp_path}/trainer.py"


def test_doctor_names_a_conflicting_package_by_its_file_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for name, file in (("taking", "trainer/x.py"), ("harmless", "my/trainer/x.py")):
        (folder := tmp_path / "site" / f"{name}-1.0.dist-info").mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        (folder / "RECORD").write_text(f"{folder.name}/METADATA,,\n{file},,\n")
    (other,) = check_trainer_code(box_of(tmp_path))
    assert "also contains files from taking, which may" in other.sentence


def test_an_environment_that_cannot_train_is_one_error_with_its_remedy(tmp_path: Path) -> None:
    python = answering(tmp_path / "env", answer(trainer=None))
    box = box_of(tmp_path, str(python))
    _, trainer, *others = [*check_environments(box), *check_torch(box)]
    assert others == []
    assert (trainer.level, trainer.sentence) == ("error", f"{python} has no trainer")
    assert trainer.remedy == f"run `{python} -m pip install 'sae-tui[train]'`"
    assert both(box)["trainer"]["problem"] == f"{trainer.sentence}; {trainer.remedy}"
    assert both(box_of(tmp_path))["trainer"] is None
    ruin = stand_in(tmp_path, "true", "ruin")
    assert box_of(tmp_path, str(ruin)).trainer("probe")[1].startswith("takes a program whose name starts with python")

"""Tests for the paths of the data folder and of all files in it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from trainer.contract.errors import UserError
from trainer.contract.paths import ENV_DATA_DIR, DataDir, box_file, data_dir, private_folder
from trainer.ranks.foreground import own_box_file


@pytest.fixture(autouse=True)
def usual_umask() -> None:
    """Set the usual umask so that folders are private because of their mode rather than a strict umask."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_flag_overrides_the_environment_and_both_override_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv(ENV_DATA_DIR, str(tmp_path / "env"))
    assert data_dir(tmp_path / "flag").root == tmp_path / "flag"
    assert data_dir().root == tmp_path / "env"
    monkeypatch.delenv(ENV_DATA_DIR)
    assert data_dir().root == tmp_path / "xdg" / "sae-tui"


def test_the_data_folder_is_absolute_with_home_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    assert data_dir("here").root == tmp_path / "here"
    assert data_dir("~/data").root == Path("/home/ada/data")
    assert data_dir("~nosuchuser/x").root == tmp_path / "~nosuchuser" / "x"


def test_a_user_without_a_home_folder_gets_an_error_but_can_still_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nameless(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "XDG_DATA_HOME", "SAE_TUI_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", nameless)
    assert box_file() is None
    assert own_box_file() is None
    with pytest.raises(UserError, match="has no home folder, and HOME is not set; set HOME, or give a data folder"):
        data_dir()
    with pytest.raises(UserError, match="the data folder cannot be ~/jobs: this user has no home folder"):
        data_dir("~/jobs")
    assert data_dir("/somewhere").root == Path("/somewhere")


def test_building_paths_creates_no_folder(tmp_path: Path) -> None:
    paths = data_dir(tmp_path / "data")
    assert paths.run(7).rank_exit(2, 1) == tmp_path / "data/runs/7/attempt2/rank1.exit.json"
    assert paths.run(7).log(0) == tmp_path / "data/runs/7/logs/rank0.log"
    assert paths.run(7).supervisor_log.parent == paths.run(7).logs
    assert paths.sae(7) == tmp_path / "data/saes/7"
    assert not paths.root.exists()


def test_all_new_folders_are_private_including_missing_parents(tmp_path: Path) -> None:
    paths = data_dir(tmp_path / "new" / "data")
    paths.run(1).create()
    paths.create()
    folders = [tmp_path / "new", *(path for path in (tmp_path / "new").rglob("*") if path.is_dir())]
    assert len(folders) == 8
    assert {mode(folder) for folder in folders} == {0o700}


def test_an_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o750)
    private_folder(shared)
    assert mode(shared) == 0o750


def test_a_file_in_place_of_a_folder_is_reported_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError) as caught:
        data_dir(tmp_path / "file" / "data").create()
    assert str(caught.value).startswith(f"cannot create the folder {tmp_path / 'file' / 'data'}: ")
    assert str(caught.value).endswith("; choose another with --data-dir")
    with pytest.raises(UserError, match=r"^extract.output: cannot create the folder .*; choose another$"):
        private_folder(tmp_path / "file" / "rows", "extract.output")


@pytest.mark.parametrize(("made", "found"), [([], False), (["cfg.json"], True), (["k=4/cfg.json", "k=8/x"], True)])
def test_exported_saes_of_single_runs_and_of_sweeps_are_found(made: list[str], found: bool, tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    for name in made:
        file = data.sae(3) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert data.exported_folder(3) == (str(tmp_path / "saes" / "3") if found else None)

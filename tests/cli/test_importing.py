"""Tests for `sae-tui import`, which creates a job from another tool's SAE. The tests run real processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.conftest import Shell

from sae_tui.jobs.launch.importing import import_sae
from trainer.contract.errors import UserError
from trainer.contract.paths import DataDir

SAMPLE = Path(__file__).parents[2] / "data" / "sample"
SMALL = ["--set", "sae.d_sae=96", "--set", "sae.k=8", "--set", "train.n_steps=5", "--set", "train.batch_size=256"]


@pytest.fixture
def foreign(shell: Shell) -> Path:
    """Return a folder with an SAE in another tool's layout; job 1 has the same weights."""
    shell.run("launch", shell.job_file, "--set", f"data.path={SAMPLE}", *SMALL, "--gpus", "cpu", "--wait")
    folder = shell.folder / "theirs"
    folder.mkdir()
    for name in ("cfg.json", "sae_weights.safetensors"):
        shutil.copy(shell.data.sae(1) / name, folder)
    config = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps({name: config[name] for name in config if name != "metadata"}))
    return folder


@pytest.mark.slow
def test_an_imported_sae_is_evaluated_compared_and_trained_like_a_job(shell: Shell, foreign: Path) -> None:
    answer = shell.json("import", foreign, "--data", SAMPLE, "--tag", "theirs", "--set", "train.batch_size=256")
    check = answer.pop("check")
    assert answer == {"id": 2, "format": "saelens", "architecture": "topk", "notes": [], "warnings": []}
    assert check["rows"] == 1000
    assert 7 < check["l0"] <= 8
    assert 0 < check["fvu"] < 1
    (job,) = shell.json("jobs", "#theirs")
    assert (job["name"], job["state"], job["step"], job["output_path"]) == (
        "theirs", "imported", 0, str(shell.data.sae(2)),
    )  # fmt: skip
    mine, theirs = shell.json("compare", 1, 2)["runs"]
    assert (theirs["fvu"], theirs["card_fvu"]) == (None, None)
    for job_id in (1, 2):
        shell.run("eval", job_id, "--wait")
    (job,) = shell.json("jobs", "state:imported")
    mine, theirs = shell.json("compare", 1, 2)["runs"]
    assert (job["heldout_fvu"], job["heldout_l0"]) == (theirs["card_fvu"], theirs["card_l0"])
    assert shell.json("job", 2)["heldout_fvu"] == job["heldout_fvu"]
    row = next(line.split() for line in shell.run("jobs").stdout.splitlines() if "theirs" in line)
    assert row[2:5] == ["imported", "-", "-"]
    assert theirs["card_fvu"] == pytest.approx(mine["card_fvu"], rel=1e-4)
    assert (theirs["card_l0"], theirs["card_rows"]) == (mine["card_l0"], mine["card_rows"])
    text = shell.run("compare", 1, 2).stdout
    assert len(next(line for line in text.splitlines() if line.startswith("report card FVU")).split()) == 7
    assert "job 2 resumes from step 0" in shell.run("resume", 2, "--set", "train.n_steps=3", "--wait").stdout
    assert shell.json("job", 2)["step"] == 3
    # Training continued from the imported weights, not from random weights.
    assert shell.json("compare", 1, 2)["runs"][1]["fvu"] < 2 * mine["card_fvu"]


@pytest.mark.slow
def test_a_failed_import_leaves_no_job_and_no_file(shell: Shell, foreign: Path) -> None:
    for folder, data, sentence in (
        (shell.folder, SAMPLE, f"FOLDER: {shell.folder} contains 2 SAEs, e.g. "),
        (SAMPLE, SAMPLE, f"FOLDER: {SAMPLE} contains no SAE; expected cfg.json + sae_weights.safetensors (saelens), "),
        (foreign, shell.folder / "nothing", "data.path: there is nothing at"),
    ):
        *progress, line = shell.errors("import", folder, "--data", data, code=1)
        # On a busy machine, progress may be printed before the error, one line every 10 s.
        assert [one for one in progress if not one.startswith("importing: ")] == []
        assert line.startswith(f"sae-tui: error: {sentence}")
    assert [job["id"] for job in shell.json("jobs")] == [1]
    assert [folder.name for folder in (shell.data.root / "runs").iterdir()] == ["1"]


@pytest.mark.slow
def test_an_existing_folder_makes_the_import_fail_and_stays_unchanged(
    shell: Shell, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Simulate another process that creates the folder after the job's id has been chosen.
    monkeypatch.setattr(DataDir, "last_id", lambda self: 1)
    (shell.data.sae(2) / "precious").mkdir(parents=True)
    with pytest.raises(UserError, match="the SAE could not be copied into"):
        import_sae(shell.data, foreign, [SAMPLE], (), gpu_source="none", tags=())
    assert (shell.data.sae(2) / "precious").is_dir()
    assert not shell.data.run(2).root.exists()
    assert [job["id"] for job in shell.json("jobs")] == [1]


@pytest.mark.slow
def test_escape_sequences_in_a_folder_name_do_not_reach_the_terminal(shell: Shell, foreign: Path) -> None:
    hostile = foreign.rename(shell.folder / "a\x1b[2Jb")
    shell.run("import", hostile, "--data", SAMPLE)
    text = shell.run("job", 2).stdout + shell.run("jobs").stdout
    assert "\x1b" not in text
    assert "imported from" in text


@pytest.mark.slow
def test_repair_restores_an_imported_job_after_its_store_was_lost(shell: Shell, foreign: Path) -> None:
    shell.run("import", foreign, "--data", SAMPLE)
    shell.data.control_db.unlink()
    shell.run("repair")
    assert [(job["id"], job["state"]) for job in shell.json("jobs")] == [(2, "imported"), (1, "finished")]

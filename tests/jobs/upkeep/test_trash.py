"""Tests for deleting and restoring jobs, even if the process is killed during a deletion."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from sae_tui.jobs.upkeep import trash
from sae_tui.jobs.upkeep.repair import repair
from trainer.contract.errors import UserError
from trainer.contract.runs.latent_notes import change_note, read_notes
from trainer.contract.runs.lock import hold
from trainer.contract.store.states import JobState

SIZE = 5000


def ended(box, state: JobState = JobState.FINISHED, **fields) -> int:
    """Record an ended job with a run folder and an SAE."""
    job_id = box.record(state=state, note="mine", **fields)
    box.data.run(job_id).create()
    (box.data.run(job_id).root / "job.toml").write_bytes(b"#" * SIZE)
    box.data.sae(job_id).mkdir(parents=True)
    (box.data.sae(job_id) / "cfg.json").write_text("{}")
    change_note(box.data.sae(job_id), 1, lambda note: replace(note, starred=True))
    box.control.add_event(job_id, "finished", "finished")
    return job_id


def files(box, job_id: int) -> list[bool]:
    return [box.data.run(job_id).job_file.exists(), (box.data.sae(job_id) / "cfg.json").exists()]


def is_listed(box, job_id: int) -> bool:
    return box.control.state(job_id) is not None


def test_a_deleted_job_disappears_with_its_files_and_can_be_restored_completely(box):
    job_id = ended(box)
    before = box.job(job_id)
    assert trash.throw_away(box.data, job_id) == f"job {job_id} (job) is deleted"
    assert (is_listed(box, job_id), files(box, job_id)) == (False, [False, False])
    assert box.control.events(job_id) == []
    assert trash.put_back(box.data, job_id) == f"job {job_id} (job) is restored"
    assert (box.job(job_id), files(box, job_id)) == (before, [True, True])
    assert [*read_notes(box.data.sae(job_id)).by_latent] == [1]
    assert not (box.data.trash / str(job_id)).exists()


def test_a_job_cannot_be_restored_after_the_trash_is_emptied(box):
    job_id = ended(box)
    trash.throw_away(box.data, job_id)
    assert trash.empty(box.data) == 0, "the process that deleted the job still runs and may restore it"
    assert trash.empty(box.data, [job_id]) > SIZE
    with pytest.raises(UserError, match=f"job {job_id} is no longer in the trash"):
        trash.put_back(box.data, job_id)


@pytest.mark.parametrize("state", [state for state in JobState if not state.is_final])
def test_a_job_that_has_not_ended_is_not_deleted(box, state):
    job_id = box.record(state=state)
    with pytest.raises(UserError, match=f"job {job_id} is {state}; stop it before you delete it"):
        trash.throw_away(box.data, job_id)
    assert is_listed(box, job_id)


def test_several_jobs_are_deleted_together_or_not_at_all(box):
    first, second, runs = ended(box), ended(box), box.record()
    before = box.job(first)
    with pytest.raises(UserError, match=f"job {runs} is queued; stop it before you delete it"):
        trash.throw_all_away(box.data, [first, runs, second])
    assert (box.job(first), files(box, first)) == (before, [True, True])
    assert trash.throw_all_away(box.data, [first, second])[1] == f"job {second} (job) is deleted"


def test_a_job_that_does_not_exist_cannot_be_deleted(box):
    with pytest.raises(UserError, match="there is no job 3"):
        trash.throw_away(box.data, 3)
    job_id = ended(box)
    trash.throw_away(box.data, job_id)
    with pytest.raises(UserError, match=f"there is no job {job_id}"):
        trash.throw_away(box.data, job_id)


def test_a_job_without_files_can_be_deleted_and_restored(box):
    job_id = box.record(state=JobState.FAILED)
    trash.throw_away(box.data, job_id)
    trash.put_back(box.data, job_id)
    assert box.job(job_id).state == JobState.FAILED


@pytest.mark.skipif(os.geteuid() == 0, reason="root can move all files")
def test_files_that_cannot_be_moved_leave_the_job_unchanged(box):
    job_id = ended(box)
    box.data.run(job_id).root.parent.chmod(0o500)
    try:
        with pytest.raises(UserError, match=f"the files of job {job_id} cannot be moved"):
            trash.throw_away(box.data, job_id)
    finally:
        box.data.run(job_id).root.parent.chmod(0o700)
    assert (is_listed(box, job_id), files(box, job_id)) == (True, [True, True])


def put_in_the_way(box) -> Path:
    """Move the folder that contains all runs, put a file in its place, and return the folder's new path."""
    runs = box.data.root / "runs"
    moved = runs.rename(runs.with_name("kept"))
    runs.write_text("")
    return moved


def give_way(box, kept: Path) -> None:
    (box.data.root / "runs").unlink()
    kept.rename(box.data.root / "runs")


def test_files_that_cannot_be_moved_back_are_named_and_restored_later(box):
    job_id = ended(box)
    trash.throw_away(box.data, job_id)
    moved = put_in_the_way(box)
    with pytest.raises(UserError) as error:
        trash.put_back(box.data, job_id)
    run, back = box.data.trash / str(job_id) / "run", box.data.run(job_id).root
    assert str(error.value).startswith(f"{run} cannot be moved back to {back}: ")
    assert "\n" not in str(error.value)
    assert run.is_dir()
    # All other files are restored, and only these remain in the trash.
    assert (is_listed(box, job_id), (box.data.sae(job_id) / "cfg.json").exists()) == (True, True)
    with pytest.raises(trash.FilesLeft, match=str(run)):
        trash.empty(box.data, [job_id])
    assert (run / "job.toml").stat().st_size == SIZE
    give_way(box, moved)
    assert trash.empty(box.data, [job_id]) == 0
    assert files(box, job_id) == [True, True]
    assert not (box.data.trash / str(job_id)).exists()


def test_a_failed_deletion_that_cannot_be_undone_is_reported_with_both_failures(box, monkeypatch):
    other, job_id = ended(box), ended(box)
    # Put a folder in place of the file that marks a complete deletion, so that the file cannot be written.
    (box.data.trash / str(job_id) / "whole").mkdir(parents=True)
    original = trash.write_whole

    def somebody_is_faster(path: Path, content: bytes) -> None:
        if path.name == "whole" and path.parent.name == str(job_id):
            box.data.run(job_id).root.write_text("in the way")
        original(path, content)

    monkeypatch.setattr(trash, "write_whole", somebody_is_faster)
    with pytest.raises(UserError) as error:
        trash.throw_all_away(box.data, [other, job_id])
    first, second = str(error.value).split("; ")
    assert first == f"the files of job {job_id} cannot be moved: Is a directory"
    run = box.data.trash / str(job_id) / "run"
    assert second == f"{run} cannot be moved back to {box.data.run(job_id).root}: the target exists"
    assert run.is_dir()
    assert (is_listed(box, job_id), is_listed(box, other), files(box, other)) == (True, True, [True, True])


def test_a_job_that_cannot_be_restored_does_not_prevent_others_from_being_restored(box):
    movable, blocked = ended(box), ended(box)
    trash.throw_all_away(box.data, [blocked, movable])
    box.data.run(blocked).root.write_text("in the way")
    with pytest.raises(UserError, match="the target exists"):
        trash.put_all_back(box.data, [blocked, movable])
    assert (is_listed(box, movable), files(box, movable)) == (True, [True, True])


def test_repair_continues_if_files_cannot_be_moved_back(box):
    blocked = ended(box)
    subprocess.run([sys.executable, "-c", CUT_OFF, str(box.data.root), "4", str(blocked)])
    box.data.run(blocked).root.write_text("in the way")
    messages = list(repair(box.data))
    assert "the target exists" in messages[0]
    assert is_listed(box, blocked)


def test_a_job_resumed_during_its_deletion_is_kept(box, monkeypatch):
    job_id = ended(box)
    original = trash.write_whole

    def resumed_meanwhile(*arguments):
        original(*arguments)
        assert box.control.transition(job_id, JobState.QUEUED)

    monkeypatch.setattr(trash, "write_whole", resumed_meanwhile)
    with pytest.raises(UserError, match=f"job {job_id} is queued; stop it before you delete it"):
        trash.throw_away(box.data, job_id)
    assert (is_listed(box, job_id), files(box, job_id)) == (True, [True, True])
    assert not (box.data.trash / str(job_id)).exists()


def test_a_job_that_is_being_deleted_cannot_be_resumed(box, monkeypatch):
    job_id = ended(box)
    original = trash._move

    def resumed_meanwhile(*arguments):
        assert not box.control.transition(job_id, JobState.QUEUED)
        original(*arguments)

    monkeypatch.setattr(trash, "_move", resumed_meanwhile)
    trash.throw_away(box.data, job_id)
    assert (is_listed(box, job_id), files(box, job_id)) == (False, [False, False])


def test_a_deleted_jobs_number_is_never_reused(box):
    alive, deleted = ended(box), ended(box)
    trash.throw_away(box.data, deleted)
    assert box.control.create_job(box.job(alive), above=box.data.last_id()) == deleted + 1
    box.control.forget(deleted + 1)
    trash.empty(box.data, [deleted])
    assert trash.empty(box.data) == 0
    assert box.control.create_job(box.job(alive), above=box.data.last_id()) == deleted + 1


CUT_OFF = """
import os, signal, sys
from pathlib import Path
from sae_tui.jobs.upkeep import trash
from trainer.contract.store.job_store import Control
from trainer.contract.paths import DataDir

step, job_id = int(sys.argv[2]), int(sys.argv[3])
taken = 0

def cut_off_before(what):
    def act(*arguments):
        global taken
        taken += 1
        if taken > step:
            os.kill(os.getpid(), signal.SIGKILL)
        return what(*arguments)
    return act

trash.write_whole, trash._move = cut_off_before(trash.write_whole), cut_off_before(trash._move)
Control.forget = cut_off_before(Control.forget)
trash.throw_away(DataDir(Path(sys.argv[1])), job_id)
"""


@pytest.mark.parametrize("step", range(6))
def test_an_interrupted_deletion_leaves_either_the_complete_job_or_nothing(box, step):
    # The functions that write, move or delete are called five times. The process is killed at the call with index
    # `step`; with 5, it is not killed.
    other, job_id = ended(box), ended(box)
    command = [sys.executable, "-c", CUT_OFF, str(box.data.root), str(step), str(job_id)]
    done = subprocess.run(command)
    assert done.returncode == (-signal.SIGKILL if step < 5 else 0)
    messages = list(repair(box.data))
    assert (is_listed(box, job_id), files(box, job_id)) == ((True, [True, True]) if step < 5 else (False, [False] * 2))
    assert [line for line in messages if "deleted jobs were removed" in line] == (
        ["0 MiB of files from deleted jobs were removed"] * (step == 5)
    )
    assert (is_listed(box, other), files(box, other)) == (True, [True, True])
    if step < 5:
        trash.throw_away(box.data, job_id)
        trash.put_back(box.data, job_id)
        assert files(box, job_id) == [True, True]


def test_folders_in_the_trash_that_are_not_jobs_are_left_alone(box):
    job_id = ended(box)
    trash.throw_away(box.data, job_id)
    (box.data.trash / "notes").mkdir()
    shutil.copytree(box.data.trash / str(job_id), box.data.trash / "copy")
    trash.empty(box.data)
    assert {folder.name for folder in box.data.trash.iterdir()} == {"notes", "copy", str(job_id)}


def test_emptying_the_trash_removes_the_lock_files_of_ended_processes(box):
    box.data.create()
    hers, ours = (box.data.locks / f"trash-{pid}.lock" for pid in (1, 2))
    hers.touch()
    hold(ours)
    trash.empty(box.data)
    assert [file.name for file in box.data.locks.glob("trash-*")] == [ours.name]


def test_the_size_of_a_folder_does_not_include_link_targets(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(b"12345")
    (tmp_path / "a" / "link").symlink_to(Path("/usr"))
    assert trash.size(tmp_path) == 5

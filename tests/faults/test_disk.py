"""Tests that a job continues while its disk is full or read-only, and saves a checkpoint once it can."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from faults.conftest import LOG_EVERY, Training
from jobs.conftest import wait_for

from trainer.contract.paths import RunPaths
from trainer.contract.runs.checkpoint_manifest import damage, newest_first, read_state
from trainer.contract.store.states import JobState

SAVE_EVERY = 50

pytestmark = pytest.mark.timeout(240)


def fill(disk: Path) -> Path:
    """Fill the disk with a single file, and return its path."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return filler


def saved_steps(training: Training) -> list[int]:
    """Return the checkpoint steps, latest first; check that all checkpoints are complete."""
    checkpoints = newest_first(training.paths.checkpoints)
    assert [damage(folder) for folder in checkpoints] == [None] * len(checkpoints)
    return [read_state(folder).position.step for folder in checkpoints]


def newest_step(training: Training) -> int:
    """Return the step in the name of the latest checkpoint.

    Do not read its files, because the job may be deleting them.
    """
    return max(int(folder.name.removeprefix("step-")) for folder in newest_first(training.paths.checkpoints))


def require_recovered(training: Training, first_failed: int) -> None:
    """Check that later saves succeeded, and that the failure and the recovery are reported in order."""
    job = training.stop()
    assert (job.state, job.error) == (JobState.STOPPED, None)
    steps, events, heartbeat = training.stored()
    assert steps == sorted({*range(LOG_EVERY, heartbeat.step + 1, LOG_EVERY), heartbeat.step})
    # There may be a third checkpoint, because the best one is also kept.
    newest, other, *_ = saved_steps(training)
    assert newest == heartbeat.step
    assert other > first_failed
    (failed,) = [event for event in events if event.level == "error"]
    assert "could not be written: " in failed.message
    assert failed.message.endswith("training continues until the next checkpoint is due")
    (saved,) = [event for event in events if "that could not be written" in event.message]
    assert saved.timestamp > failed.timestamp


@pytest.mark.slow
def test_a_full_disk_loses_neither_the_last_good_checkpoint_nor_a_row(train, small_disk, tmp_path) -> None:
    def onto_small_disk(paths: RunPaths) -> None:
        files = {file: file.read_bytes() for file in paths.root.iterdir() if file.is_file()}
        small_disk(paths.root)
        for file, content in files.items():
            file.write_bytes(content)
        # Keep the logs, which the test reads, on another disk.
        (tmp_path / "logs").mkdir()
        paths.create()
        subprocess.run(["mount", "--bind", tmp_path / "logs", paths.logs], check=True)

    training = train(n_ranks=2, prepare=onto_small_disk, checkpoint_every=SAVE_EVERY)
    training.says("checkpoint saved")
    filler = fill(training.paths.root)
    training.says("metrics cannot be stored and are kept in memory for now: the disk with ")
    training.says("iB are free; free some space on its disk and try again; training continues")
    at, before = training.step(), saved_steps(training)
    training.go_on(3 * SAVE_EVERY)
    assert saved_steps(training) == before
    filler.unlink()
    wait_for(lambda: newest_step(training) > at, "the next checkpoint")
    wait_for(lambda: any(event.kind == "store" for event in training.stored()[1]), "metrics to be stored")
    training.go_on(2 * SAVE_EVERY)
    require_recovered(training, at)
    (message,) = [event.message for event in training.stored()[1] if event.kind == "store"]
    assert "no rows were lost" in message


def remounted(disk: Path, how: str) -> bool:
    """Remount the disk and return whether this succeeded; it fails while a file on the disk is being written."""
    return subprocess.run(["mount", "-o", f"remount,{how}", disk], capture_output=True).returncode == 0


@pytest.mark.slow
def test_checkpoints_are_saved_again_once_their_disk_is_no_longer_read_only(train, small_disk) -> None:
    training = train(prepare=lambda paths: small_disk(paths.checkpoints), checkpoint_every=SAVE_EVERY)
    disk = training.paths.checkpoints
    training.says("checkpoint saved")
    wait_for(lambda: remounted(disk, "ro"), "the disk to be read-only")
    training.says("Read-only file system; make its folder writable and try again; training continues")
    at, before = training.step(), saved_steps(training)
    training.go_on(3 * SAVE_EVERY)
    assert saved_steps(training) == before
    assert remounted(disk, "rw")
    wait_for(lambda: newest_step(training) > at, "the next checkpoint")
    training.go_on(2 * SAVE_EVERY)
    require_recovered(training, at)


def test_the_last_checkpoint_fits_on_a_full_disk_because_its_space_is_reserved(train, small_disk) -> None:
    training = train(prepare=lambda paths: small_disk(paths.checkpoints), checkpoint_every_minutes=0)
    fill(training.paths.checkpoints)
    job = training.stop()
    assert (job.state, job.error) == (JobState.STOPPED, None)
    assert saved_steps(training) == [training.stored()[2].step]
    assert (training.box.data.sae(training.id) / "cfg.json").exists()

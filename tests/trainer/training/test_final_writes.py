"""Tests that a run finishing on a full disk waits for space, keeps its SAE on another disk, and loses nothing."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer.checkpoints.checkpoint import load
from trainer.checkpoints.reserve import Reserve
from trainer.contract.errors import UserError
from trainer.contract.paths import RESERVE, RunPaths
from trainer.contract.runs.checkpoint_manifest import newest_first
from trainer.contract.runs.how_far import exported_tokens
from trainer.contract.settings.job import JobConfig
from trainer.training import final_writes
from trainer.training.loop import Trainer

# A file size limit in bytes that is high enough for settings, but too low for weights.
SMALL = 4000
MakeJob, MakeTrainer = Callable[..., JobConfig], Callable[..., Trainer]


@pytest.fixture
def other_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a folder that is treated as another disk, for SAEs that wait for space."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.setattr(final_writes, "_other_places", lambda _: [folder])
    return folder


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Yield a function that limits the file size, so that writes fail as on a full disk.

    Python ignores SIGXFSZ. Any user may lower the limit and raise it again.
    """
    monkeypatch.setattr(final_writes, "RETRY_S", 0.02)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(n_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Wait:
    """Calls a function while the run is waiting for space, to simulate a user's action."""

    def __init__(self, progress, act: Callable[[], object]) -> None:
        self.progress, self.seen, was = progress, 0, progress.heartbeat

        def heartbeat(phase: str, step: int, tokens: int) -> None:
            was(phase, step, tokens)
            if phase == "waiting for space":
                self.seen += 1
                if self.seen == 3:
                    act()

        progress.heartbeat = heartbeat


def space_messages(kept) -> list[str]:
    return [message for kind, _, message in kept.events if kind == "space"]


def test_while_the_last_save_is_waiting_for_space_the_sae_is_kept_on_another_disk(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, full: Callable[[int], None], other_disk: Path, tmp_path: Path
) -> None:
    found: list[list[Path]] = []

    def free() -> None:
        found.append(list(other_disk.glob("*/sae/cfg.json")))
        full(resource.RLIM_INFINITY)

    wait = Wait(kept, free)
    job = make_job(train={"n_steps": 3, "report_card": False})
    trainer = make_trainer(job, wait.progress)
    # This limit is too low for the optimizer state, and for the weights in the run folder.
    export, only_here = trainer._exporter._export_one, tmp_path / "sae"

    def where_there_is_room(*arguments, **others) -> None:
        if arguments[-1] != only_here:
            full(resource.RLIM_INFINITY)
        export(*arguments, **others)
        full(SMALL) if not found else None

    trainer._exporter._export_one = where_there_is_room
    full(SMALL)
    assert trainer.run()
    assert [len(saes) for saes in found] == [1]
    assert wait.seen == 3
    (first, meanwhile, again) = space_messages(kept)
    assert first.startswith(f"waiting for space: {tmp_path / 'checkpoints' / 'step-00000003'} could not be written: ")
    assert f"waiting for disk space to write {tmp_path / 'sae'}; until then, its SAE is in {other_disk}" in meanwhile
    assert "there is enough disk space again" in again
    assert list(other_disk.iterdir()) == []
    assert load(tmp_path / "checkpoints")[1] == trainer.position
    assert exported_tokens(tmp_path / "sae") == trainer.position.tokens


@pytest.mark.parametrize("was_stopped", [False, True], ids=["finished", "stopped"])
def test_a_stop_request_ends_the_wait_with_a_message_that_says_where_the_sae_is(
    was_stopped: bool,
    make_job: MakeJob,
    make_trainer: MakeTrainer,
    kept,
    full: Callable[[int], None],
    other_disk: Path,
    tmp_path: Path,
) -> None:
    stop = threading.Event()
    if was_stopped:
        stop.set()
    trainer = make_trainer(make_job(train={"n_steps": 3}), Wait(kept, stop.set).progress, stop=stop)
    export = trainer._exporter._export_one

    def where_there_is_room(*arguments, **others) -> None:
        full(resource.RLIM_INFINITY if arguments[-1].is_relative_to(other_disk) else SMALL)
        export(*arguments, **others)

    trainer._exporter._export_one = where_there_is_room
    full(SMALL)
    with pytest.raises(UserError, match=r"^stopped before there was enough disk space: .* could not be") as error:
        trainer.run()
    (sae,) = other_disk.glob("*/sae")
    assert str(error.value).endswith(f"; the trained SAE is in {sae}")
    assert exported_tokens(sae) == trainer.position.tokens
    assert not (tmp_path / "checkpoints" / RESERVE).exists()


def test_a_stopped_run_waits_for_space_and_ends_as_stopped(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, full: Callable[[int], None], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(final_writes, "_other_places", lambda _: [])
    stop = threading.Event()
    stop.set()
    wait = Wait(kept, lambda: full(resource.RLIM_INFINITY))
    full(SMALL)
    trainer = make_trainer(make_job(train={"n_steps": 3}), wait.progress, stop=stop)
    assert not trainer.run()
    assert wait.seen == 3
    assert load(tmp_path / "checkpoints")[1] == trainer.position
    assert exported_tokens(tmp_path / "sae") == trainer.position.tokens
    assert stop.is_set()


def test_a_write_that_can_never_succeed_is_not_retried_but_the_sae_is_still_written(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="checkpoints"):
        make_trainer(make_job(train={"n_steps": 3}), kept).run()
    assert exported_tokens(tmp_path / "sae") is not None
    assert space_messages(kept) == []


# Tests for the reserved space.


def test_space_for_the_last_checkpoint_is_reserved_and_always_freed_at_the_end(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    file, sizes = tmp_path / "checkpoints" / RESERVE, []
    was = kept.heartbeat

    def look(phase: str, step: int, tokens: int) -> None:
        was(phase, step, tokens)
        sizes.append((phase, file.stat().st_blocks * 512 if file.exists() else 0))
        if step == 4:
            raise RuntimeError("a fault")

    kept.heartbeat = look
    assert make_trainer(make_job(train={"n_steps": 3}), kept).run()
    (checkpoint,) = newest_first(tmp_path / "checkpoints")
    files = checkpoint / "tensors.safetensors", *(tmp_path / "sae").glob("*.safetensors")
    needed = sum(one.stat().st_size for one in files)
    held = {size for phase, size in sizes if phase == "training"}
    if held == {0}:
        pytest.skip("this file system cannot reserve space for a file")
    assert needed <= min(held) <= 2 * needed + 2**18
    assert not file.exists()
    with pytest.raises(RuntimeError, match="a fault"):
        make_trainer(make_job(train={"n_steps": 9}), kept).run()
    assert not file.exists()


def test_no_reserve_file_remains_if_it_does_not_fit_or_its_process_is_killed(
    tmp_path: Path,
) -> None:
    paths = RunPaths(tmp_path)
    paths.create()
    Reserve(paths.checkpoints / RESERVE, 2**60).hold()
    assert list(paths.checkpoints.iterdir()) == []
    Reserve(paths.checkpoints / RESERVE, 4096).hold()
    paths.free_reserve()
    assert list(paths.checkpoints.iterdir()) == []


def test_on_a_full_disk_there_is_still_space_for_the_last_checkpoint_and_the_sae(
    make_job: MakeJob, make_trainer: MakeTrainer, kept, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    try:
        was = kept.heartbeat

        def fill(phase: str, step: int, tokens: int) -> None:
            was(phase, step, tokens)
            if (phase, step) == ("training", 2):
                with open(disk / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
                    while filler.write(bytes(4096)):
                        pass

        kept.heartbeat = fill
        job = make_job(train={"n_steps": 5, "report_card": False})
        trainer = make_trainer(job, kept, checkpoints=disk / "checkpoints", output=disk / "sae")
        assert trainer.run()
        assert load(disk / "checkpoints")[1].step == 5
        assert exported_tokens(disk / "sae") == trainer.position.tokens
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)

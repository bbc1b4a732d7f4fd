"""Tests the thread that mirrors checkpoints: real checkpoints, a mirror in a folder, and failures of the store."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.conftest import Kept
from trainer.checkpoints.checkpoint import Checkpoints
from trainer.contract.errors import UserError
from trainer.contract.runs.checkpoint_manifest import TENSORS, Position, newest_whole
from trainer.contract.runs.checkpoint_mirror import CheckpointMirror, MirrorTaken, read_mirrored
from trainer.contract.runs.mirrored_run import fetch
from trainer.contract.runs.rank_spec import RankSpec
from trainer.contract.settings.job import JobConfig
from trainer.contract.settings.job_file import dump_job
from trainer.contract.store.metrics_store import MIRRORING
from trainer.training import checkpoint_mirroring
from trainer.training.checkpoint_mirroring import STAGING, CheckpointMirroring

Eventually = Callable[..., None]


class Run:
    """A run folder with a mirror, whose uploads can be made to fail or to wait."""

    def __init__(self, folder: Path, job: JobConfig, kept: Kept) -> None:
        self.folder, self.kept = folder / "run", kept
        self.url = str(job.train.mirror_checkpoints)
        (self.folder / "attempt1").mkdir(parents=True)
        (self.folder / "job.toml").write_text(dump_job(job))
        self._job = job
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep=1)
        self.mirroring = self.new()

    def new(self) -> CheckpointMirroring:
        spec = RankSpec(self.folder, self.folder / "sae", attempt=1, world_size=1, device="cpu")
        return CheckpointMirroring(spec, self._job, self.kept)

    def save(self, step: int) -> Path:
        folder = self.checkpoints.save({"W": torch.full((3,), float(step))}, Position(step, step))
        self.mirroring.saved()
        return folder

    @property
    def step(self) -> int | None:
        mirrored = read_mirrored(self.folder)
        return mirrored.step if mirrored else None

    @property
    def problem(self) -> str:
        mirrored = read_mirrored(self.folder)
        return mirrored.problem if mirrored else ""

    def finish(self, output: Path | None = None, stop: threading.Event | None = None) -> None:
        self.mirroring.finish(output, stop or threading.Event(), Position(9, 9))

    def events(self, level: str) -> list[str]:
        return [message for kind, of, message in self.kept.events if (kind, of) == ("checkpoint-mirror", level)]


@pytest.fixture
def run(make_job: Callable[..., JobConfig], tmp_path: Path, kept: Kept) -> Iterator[Run]:
    mirror = {"mirror_checkpoints": f"file://{tmp_path}/mirror", "mirror_every_minutes": 0}
    one = Run(tmp_path, make_job(train=mirror), kept)
    yield one
    with contextlib.suppress(RuntimeError):
        one.finish()


def test_a_checkpoint_that_is_removed_during_its_upload_is_mirrored_whole(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    put = CheckpointMirror.put

    def remove_first(mirror: CheckpointMirror, *arguments: Any) -> str:
        shutil.rmtree(run.folder / "checkpoints")
        return put(mirror, *arguments)

    monkeypatch.setattr(CheckpointMirror, "put", remove_first)
    run.mirroring.start()
    run.save(5)
    eventually(lambda: run.step == 5)
    fetched = fetch(run.url, tmp_path / "new")
    assert fetched.step == 5
    assert newest_whole(fetched.run_dir / "checkpoints").name == "step-00000005"
    run.finish()
    assert not (run.folder / STAGING).exists()


def test_a_damaged_checkpoint_is_not_mirrored(run: Run, eventually: Eventually) -> None:
    run.checkpoints = Checkpoints(run.folder / "checkpoints", keep=2)
    run.save(5)
    (run.save(6) / TENSORS).write_bytes(b"damaged")
    run.mirroring.start()
    eventually(lambda: run.step == 5)


def test_failures_are_reported_rarely_and_the_next_checkpoint_is_tried(
    run: Run, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    failures: list[int] = []

    def fail(_: CheckpointMirror, *arguments: Any) -> str:
        failures.append(1)
        raise UserError("no network") if len(failures) < 3 else ValueError("no\nnetwork")

    run.mirroring.start()
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointMirror, "put", fail)
        for step in (1, 2, 3):
            run.save(step)
            eventually(lambda step=step: len(failures) == step)
        eventually(lambda: run.problem.startswith("no"))
    assert run.events("warning") == ["checkpoints are not mirrored: no network; the next checkpoint is tried again"]
    run.save(4)
    eventually(lambda: run.step == 4)
    assert run.problem == ""
    eventually(lambda: run.events("info"))
    assert run.events("info")[0].endswith("the first after 3 failed uploads")


def test_a_store_that_cannot_be_used_stops_only_a_run_that_never_used_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: CheckpointMirror) -> None:
        raise UserError("access was denied")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointMirror, "claim", fail)
        with pytest.raises(UserError, match="access was denied"):
            run.mirroring.start()
    run.mirroring.start()
    run.finish()
    run.mirroring = run.new()
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointMirror, "claim", fail)
        run.mirroring.start()
    assert "access was denied" in run.events("warning")[0]
    # Another run never takes over a mirror that contains checkpoints.
    run.save(1)
    run.finish()
    shutil.rmtree(run.folder / "attempt1")
    (run.folder / "mirrored.json").unlink()
    with pytest.raises(MirrorTaken, match="already contains the run"):
        run.new().start()


def test_the_end_mirrors_the_last_checkpoint_and_the_sae(run: Run, tmp_path: Path) -> None:
    (run.folder / "sae" / "k=4").mkdir(parents=True)
    (run.folder / "sae" / "k=4" / "cfg.json").write_text("{}")
    (run.folder / "sae" / "link").symlink_to("/etc/passwd")
    run.kept.heartbeat("finished", 9, 9)
    run.mirroring.start()
    run.save(9)
    run.finish(run.folder / "sae")
    fetched = fetch(run.url, tmp_path / "new")
    assert (fetched.step, fetched.has_sae) == (9, True)
    assert [path.name for path in (fetched.run_dir / "sae").rglob("*")] == ["k=4", "cfg.json"]
    assert run.kept.phases[-1] == "finished"
    assert any(phase.startswith(MIRRORING) for phase in run.kept.phases)


def test_another_stop_request_or_the_time_limit_ends_the_wait_for_the_last_upload(
    run: Run, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    began, go_on = threading.Event(), threading.Event()

    def hang(_: CheckpointMirror, *arguments: Any) -> str:
        began.set()
        go_on.wait()
        return ""

    monkeypatch.setattr(CheckpointMirror, "put", hang)
    run.mirroring.start()
    run.save(9)
    stop = threading.Event()
    # The first request ended the training.
    stop.set()
    ended = threading.Thread(target=run.finish, args=(None, stop))
    ended.start()
    began.wait(60)
    eventually(lambda: not stop.is_set())
    stop.set()
    ended.join(60)
    assert not ended.is_alive()
    assert stop.is_set()
    monkeypatch.setattr(checkpoint_mirroring, "LAST_S", 0.0)
    run.finish()
    assert run.events("warning")[-1].endswith("was not complete when the run ended")
    go_on.set()

"""Tests the thread that mirrors checkpoints: real checkpoints, a mirror in a folder, and failures of the store."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
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

    def new(self, resume_from: Path | None = None) -> CheckpointMirroring:
        spec = RankSpec(
            self.folder, self.folder / "sae", attempt=1, world_size=1, device="cpu", resume_from=resume_from
        )
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


def test_an_older_checkpoint_never_replaces_a_mirrored_one(run: Run, eventually: Eventually, tmp_path: Path) -> None:
    run.checkpoints = Checkpoints(run.folder / "checkpoints", keep=2)
    run.mirroring.start()
    run.save(5)
    eventually(lambda: run.step == 5)
    newest = run.save(6)
    eventually(lambda: run.step == 6)
    (newest / TENSORS).write_bytes(b"damaged")
    run.finish()
    assert run.step == 6
    assert fetch(run.url, tmp_path / "new").step == 6


def test_a_checkpoint_removed_while_it_is_staged_gives_way_to_a_later_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    run.checkpoints = Checkpoints(run.folder / "checkpoints", keep=3)
    for step in (3, 6):
        run.save(step)
    link, uploaded = checkpoint_mirroring._link, []

    def remove_first(source: Path, target: Path) -> None:
        if source.parent.name == "step-00000006" and source.parent.exists():
            shutil.rmtree(source.parent)
            run.checkpoints.save({"W": torch.zeros(3)}, Position(7, 7))
        link(source, target)

    put = CheckpointMirror.put
    monkeypatch.setattr(checkpoint_mirroring, "_link", remove_first)
    monkeypatch.setattr(CheckpointMirror, "put", lambda *one: (uploaded.append(one[1]), put(*one))[1])
    run.mirroring.start()
    eventually(lambda: run.step is not None)
    assert uploaded == ["step-00000007"]


def test_the_checkpoint_that_a_moved_run_resumes_from_is_not_uploaded_again(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.mirroring.start()
    run.save(5)
    run.finish()
    run.folder = fetch(run.url, tmp_path / "new").run_dir
    run.mirroring = run.new(run.folder / "checkpoints" / "step-00000005")
    monkeypatch.setattr(CheckpointMirror, "put", lambda *_: pytest.fail("the only copy was replaced"))
    run.mirroring.start()
    run.finish()
    assert (run.step, run.problem) == (5, "")


def test_uploads_are_due_by_the_age_of_the_mirrored_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    waits: list[float] = []
    clock = [1000.0]

    def wait(timeout: float | None = None) -> bool:
        waits.append(timeout or 0.0)
        clock[0] += waits[-1]
        return False

    # With n = 10, checkpoints are saved at minutes 7, 14 and 21; the one of minute 7 is too old from minute 17.
    monkeypatch.setattr(run.mirroring._ending, "wait", wait)
    times = SimpleNamespace(monotonic=lambda: clock[0], time=time.time)
    monkeypatch.setattr(checkpoint_mirroring, "time", times)
    run.mirroring._job = run.mirroring._job.replace("train", mirror_every_minutes=10)
    run.mirroring.start()
    for step, minute in ((1, 7), (2, 14), (3, 21)):
        clock[0] = 1000.0 + 60 * minute
        run.save(step)
        eventually(lambda step=step: run.step == step)
    assert waits == [0.0, 180.0, 180.0]


def test_a_store_that_never_answers_delays_the_start_only_up_to_a_limit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    run.mirroring.start()
    run.finish()
    monkeypatch.setattr(checkpoint_mirroring, "START_S", 0.05)
    monkeypatch.setattr(CheckpointMirror, "claim", lambda _: answer.wait())
    try:
        run.mirroring = run.new()
        run.mirroring.start()
        assert "did not answer within 0.05 s" in run.events("warning")[0]
        (run.folder / "mirrored.json").unlink()
        with pytest.raises(
            UserError, match=r"^train.mirror_checkpoints: file://.* did not answer within 0.05 s; check"
        ):
            run.new().start()
    finally:
        answer.set()


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

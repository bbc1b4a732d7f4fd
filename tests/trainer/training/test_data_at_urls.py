"""Tests a training run whose store goes away: it ends with a checkpoint, and resumes to the same weights."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.remote_shards import URL, Requests, store_for_a_test, upload, write_shards

from trainer.activations.shards import ShardCutError
from trainer.contract import object_cache
from trainer.contract.runs.checkpoint_manifest import newest_first, read_state
from trainer.contract.settings.job import JobConfig
from trainer.training.loop import Trainer


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Requests]]:
    yield from store_for_a_test(monkeypatch, tmp_path / "cache")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_run_that_lost_its_store_saves_its_last_step_and_resumes_exactly(
    make_job: Callable[..., JobConfig],
    make_trainer: Callable[..., Trainer],
    store: type[Requests],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    is_stopped: bool,
) -> None:
    write_shards(tmp_path / "shards")
    upload(tmp_path / "shards")
    job = make_job(data={"path": URL, "shuffle_shards": 1}, train={"n_steps": 30, "batch_size": 64, "eval_every": 0})
    whole = make_trainer(job, checkpoints=tmp_path / "others")
    assert whole.run()
    whole.data.caches[0].close()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    object_cache.forget_refreshed()
    store.reads.clear()
    stop = threading.Event()

    def fail(name: str, first: int) -> None:
        if len(store.whole_reads()) >= 4:
            if is_stopped:
                stop.set()
            raise ConnectionRefusedError("connection refused")

    store.before_read = staticmethod(fail)
    monkeypatch.setattr(object_cache, "PATIENCE_S", 60.0 if is_stopped else 0.2)
    cut = make_trainer(job, stop=stop)
    if is_stopped:
        assert not cut.run()
    else:
        with pytest.raises(ShardCutError, match=r"^data\.path: memory://.* in 5 tries: connection refused$"):
            cut.run()
    cut.data.caches[0].close()
    saved = read_state(newest_first(tmp_path / "checkpoints")[0])
    assert 0 < saved.position.step == cut.position.step < 30
    store.before_read = staticmethod(lambda name, first: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty too"))
    object_cache.forget_refreshed()
    waits, note = list[float](), Trainer._note_waiting
    monkeypatch.setattr(Trainer, "_note_waiting", lambda self, waited_s: (waits.append(waited_s), note(self, waited_s)))
    resumed = make_trainer(job, resume_from=tmp_path / "checkpoints")
    assert resumed.run()
    # A resumed run, too, notices a stop while it waits.
    assert waits
    expected, found = (one.learners[""].sae.state_dict() for one in (whole, resumed))
    assert all(torch.equal(expected[name], found[name]) for name in expected)

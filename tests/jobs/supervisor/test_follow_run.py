"""Tests for how the supervisor of a running job reacts to requests, a locked store and a lack of progress."""

from __future__ import annotations

import contextlib
import os

import msgspec
import pytest

from sae_tui.jobs.supervisor import follow_run
from sae_tui.jobs.supervisor.follow_run import Watch
from trainer.contract.planning.plan import Plan
from trainer.contract.runs.how_far import OVERFITTING, RESUMED
from trainer.contract.settings.job import Launch
from trainer.contract.store.job_store import Control
from trainer.contract.store.metrics_store import Heartbeat, SeriesWriter
from trainer.contract.store.rows import Event
from trainer.contract.store.states import JobState


@pytest.fixture
def watching(box):
    """Return a function that creates a `Watch`, with its own store connection, for a job in the given state."""
    with contextlib.ExitStack() as stack:

        def begin(state: JobState) -> Watch:
            job_id = box.record()
            for step in (JobState.STARTING, JobState.RUNNING):
                if box.job(job_id).state != state:
                    box.control.transition(job_id, step)
            control = stack.enter_context(contextlib.closing(Control(box.data.control_db)))
            return Watch(control, control.job(job_id), box.data.run(job_id), Launch())

        yield begin


def test_a_jobs_mode_is_updated_once_its_ranks_have_chosen_it(box, watching, monkeypatch):
    monkeypatch.setattr(follow_run, "PUBLISH_EVERY_S", 0.0)
    followed = watching(JobState.STARTING)
    followed.poll()
    assert box.job(1).mode == "single"
    attempt = box.data.run(1).attempt(box.job(1).attempt)
    attempt.mkdir(parents=True)
    plan = Plan("tensor", 2, 2, 8192, 4096, 2, step_s=0.1, needs_bytes=1)
    (attempt / "plan.json").write_bytes(msgspec.json.encode(plan))
    followed.poll()
    assert box.job(1).mode == "tensor"
    version = box.control.version()
    followed.poll()
    assert box.control.version() == version


@pytest.mark.parametrize("kind", ["stop", "kill"])
def test_a_stop_requested_while_the_store_is_locked_is_recorded_after_its_release(box, watching, locked_store, kind):
    followed = watching(JobState.RUNNING)
    box.control.request(1, kind)
    with locked_store(box.data.control_db):
        followed.poll()
        assert followed.asked_to_kill == (kind == "kill")
    assert box.job(1).state == JobState.RUNNING
    followed.poll()
    followed.poll()
    assert box.job(1).state == JobState.STOPPING
    assert [event.kind for event in box.control.events(1)] == ["stopping"]


def test_a_jobs_slow_start_is_reported_once(box, watching, monkeypatch):
    monkeypatch.setattr(follow_run, "PUBLISH_EVERY_S", 0.0)
    in_time = watching(JobState.STARTING)
    in_time.poll()
    assert box.control.events(1) == []
    monkeypatch.setattr(follow_run, "SLOW_START_S", 0.0)
    followed = watching(JobState.STARTING)
    followed.poll()
    followed.poll()
    (event,) = box.control.events(2)
    assert (event.kind, event.level) == ("slow-start", "warning")
    assert event.message.startswith("has not started to train")


def test_a_resumed_job_is_running_only_once_its_new_ranks_have_begun(box, watching, monkeypatch):
    monkeypatch.setattr(follow_run, "PUBLISH_EVERY_S", 0.0)
    paths = box.data.run(1)
    paths.create()
    with contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
        writer.write([], Heartbeat("saving", 40, 100, 4000, 1.0))
        followed = watching(JobState.STARTING)
        followed.poll()
        assert box.job(1).state == JobState.STARTING
        writer.write([], Heartbeat("resuming", 30, 100, 3000, 2.0))
        followed.poll()
    assert (box.job(1).state, box.job(1).step) == (JobState.RUNNING, 30)


def test_overfitting_is_stored_with_the_job_until_the_run_is_resumed(box, watching, monkeypatch):
    monkeypatch.setattr(follow_run, "PUBLISH_EVERY_S", 0.0)
    paths = box.data.run(1)
    paths.create()

    def report(step: int, kind: str) -> str | None:
        event = Event(timestamp=step, level="warning", kind=kind, message=f"{kind} at step {step}")
        writer.write([], Heartbeat("training", step, 100, 100 * step, float(step)), [event])
        followed.poll()
        return box.job(1).overfitting

    with contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
        followed = watching(JobState.STARTING)
        assert report(40, "card") is None
        assert report(50, OVERFITTING) == report(51, "card") == "overfitting at step 50"
        assert report(60, RESUMED) is None
        assert report(70, OVERFITTING) == "overfitting at step 70"


def test_an_unfinished_save_by_an_earlier_attempt_does_not_prevent_detecting_a_hang(box, watching, monkeypatch):
    paths = box.data.run(1)
    paths.create()
    with contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
        writer.write([], Heartbeat("saving", 40, 100, 4000, 1.0))
        followed = watching(JobState.STARTING)
    followed.poll()
    later = follow_run.time.monotonic() + 3600
    monkeypatch.setattr(follow_run.time, "monotonic", lambda: later)
    assert followed.is_given_up


def test_a_run_whose_steps_cannot_be_read_is_not_mistaken_for_a_hanging_run(box, watching, locked_store, monkeypatch):
    monkeypatch.setattr(follow_run, "PUBLISH_EVERY_S", 0.0)
    now = follow_run.time.monotonic()
    monkeypatch.setattr(follow_run.time, "monotonic", lambda: now)
    paths = box.data.run(1)
    paths.create()
    attempt = paths.attempt(0)
    attempt.mkdir(parents=True)
    paths.rank_spec(0).touch()
    (attempt / "plan.json").write_bytes(
        msgspec.json.encode(Plan("tensor", 2, 2, 8192, 4096, 2, step_s=0.1, needs_bytes=1))
    )
    with contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
        followed = watching(JobState.STARTING)
        with locked_store(box.data.control_db):
            for step in range(1, 4):
                writer.write([], Heartbeat("training", step, 100, step, 1.0))
                now += 590
                followed.poll()
                assert not followed.is_overdue
        for second in range(1, 4):
            os.utime(paths.rank_spec(0), (second, second))
            now += 590
            followed.poll()
            assert not followed.is_overdue
    assert (box.job(1).state, box.job(1).mode, box.job(1).step) == (JobState.RUNNING, "tensor", 3)
    now += 6000
    followed.poll()
    assert followed.is_overdue

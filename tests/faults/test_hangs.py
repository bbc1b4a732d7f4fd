"""Tests that a halted rank is detected and reported, and that all ranks are restarted."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest
from faults import hangs

from sae_tui.jobs.supervisor import follow_run
from sae_tui.jobs.supervisor.follow_run import Watch
from trainer.contract.settings.job import Launch
from trainer.contract.store.metrics_store import Heartbeat, SeriesWriter
from trainer.contract.store.states import JobState

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
def test_a_halted_rank_is_reported_with_stack_traces_and_the_job_is_restarted(tmp_path: Path) -> None:
    hangs.rank_halted(tmp_path / "box", random.Random(0), 0)


@pytest.mark.slow
def test_a_rank_halted_after_a_save_is_not_treated_as_still_saving(tmp_path: Path) -> None:
    hangs.rank_halted_after_saving(tmp_path / "box", random.Random(0))


def test_an_attempts_last_heartbeat_does_not_make_the_next_attempt_count_as_stalled(box, monkeypatch) -> None:
    monkeypatch.setattr(follow_run, "PUBLISH_EVERY_S", 0.0)
    job_id = box.record()
    paths = box.data.run(job_id)
    paths.create()
    box.control.transition(job_id, JobState.STARTING)
    with contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
        writer.write([], Heartbeat("saving", 7, 10, 448, time.time()))
        limits = Launch(stalled_after_s=1e-6, end_stalled_after_s=1e-6)
        followed = Watch(box.control, box.job(job_id), paths, limits)
        followed.poll()
        assert (box.job(job_id).state, followed.is_given_up) == (JobState.STARTING, False)
        writer.write([], Heartbeat("resuming", 5, 10, 320, time.time()))
        for _ in range(2):
            followed.poll()
        assert (box.job(job_id).state, followed.is_given_up) == (JobState.RUNNING, False)
        writer.write([], Heartbeat("training", 6, 10, 384, time.time()))
        followed.poll()
        assert followed.is_given_up
    followed.close()

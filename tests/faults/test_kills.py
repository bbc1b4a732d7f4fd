"""Tests for jobs whose processes are killed without warning."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest
from faults import kills
from faults.real_job import undisturbed

from sae_tui.jobs.reconcile import reconcile
from trainer.contract.process import boot_id
from trainer.contract.store.metrics_store import Heartbeat, SeriesWriter
from trainer.contract.store.states import JobState

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
def test_a_job_continues_when_its_terminal_is_closed(tmp_path: Path) -> None:
    kills.terminal_closed(tmp_path / "box", random.Random(0))


def test_killing_the_launch_command_leaves_either_a_running_job_or_no_job(tmp_path: Path) -> None:
    kills.launcher_killed(tmp_path / "box", random.Random(0))


def test_a_killed_supervisors_job_saves_and_gives_bitwise_identical_results_once_resumed(tmp_path, like) -> None:
    kills.supervisor_killed(tmp_path / "box", random.Random(1), like)


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_restarted_job_gives_bitwise_identical_results(tmp_path, like) -> None:
    assert kills.rank_killed(tmp_path / "box", 1, like) < 60


@pytest.mark.slow
def test_after_any_process_is_killed_a_resumed_job_gives_bitwise_identical_results(tmp_path: Path) -> None:
    alone = undisturbed(tmp_path / "undisturbed", 1)
    kills.killed_at_random(tmp_path / "box", random.Random(1), alone, 1, checkpoint_every=1)


@pytest.mark.slow
def test_ranks_that_raise_an_exception_are_restarted_until_they_succeed(tmp_path: Path) -> None:
    kills.rank_raises(tmp_path / "box")


@pytest.mark.slow
def test_nan_values_in_the_data_fail_the_job_without_a_restart(tmp_path: Path) -> None:
    kills.rank_finds_nan(tmp_path / "box")


def test_a_job_whose_rank_ran_out_of_memory_is_not_restarted_with_the_same_settings(tmp_path: Path) -> None:
    kills.rank_out_of_memory(tmp_path / "box")


@pytest.mark.parametrize(("phase", "state"), [("finished", JobState.FINISHED), ("stopped", JobState.LOST)])
def test_a_job_without_a_supervisor_counts_as_finished_if_its_ranks_reported_that(box, phase, state) -> None:
    job_id = box.record(total_steps=10, supervisor_pid=1, supervisor_start=1, boot_id=boot_id())
    box.data.run(job_id).create()
    assert box.control.lease(box.job(job_id), [(0, "GPU-0")], attempt=1)
    with contextlib.closing(SeriesWriter(box.data.run(job_id).metrics_db)) as writer:
        writer.write([], Heartbeat(phase, 10, 10, 640, time.time()))
    box.data.sae(job_id).mkdir(parents=True)
    (box.data.sae(job_id) / "cfg.json").write_text("{}")
    assert reconcile(box.data) == [job_id]
    job = box.job(job_id)
    assert (job.state, job.step, job.output_path) == (state, 10, str(box.data.sae(job_id)))
    assert box.control.leases() == []


def test_an_old_job_that_was_just_resumed_is_not_lost_before_its_supervisor_starts(box) -> None:
    job_id = box.record(created=time.time() - 3600, queued=time.time() - 3600)
    assert reconcile(box.data) == [job_id]
    box.control.transition(job_id, JobState.QUEUED)
    assert reconcile(box.data) == []
    box.control.update(job_id, queued=time.time() + 3600)
    # The job was queued an hour in the future, which is possible only if the clock has been set back.
    assert reconcile(box.data) == [job_id]

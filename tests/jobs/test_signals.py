"""Tests for jobs whose parent process blocks or ignores signals, as daemons and notebook servers do."""

from __future__ import annotations

import signal

from sae_tui.jobs import edits
from trainer.contract.store.states import JobState


def test_a_failed_job_is_recorded_as_failed_even_if_sigchld_was_ignored(box):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        job_id = box.launch("steps=10 fail=0@3")
        other = box.launch("steps=100000")
        box.wait_steps(other)
    finally:
        signal.signal(signal.SIGCHLD, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    job = box.wait_ended(job_id)
    assert (job.state, job.error) == (JobState.FAILED, "RuntimeError: the loss is not finite")
    edits.kill(box.data, other)
    assert box.wait_ended(other).state == JobState.STOPPED


def test_a_job_without_stored_metrics_is_recorded_as_failed(box):
    job = box.wait_ended(box.launch("steps=10 mute"))
    assert job.state == JobState.FAILED
    assert job.error.startswith("its SAE was trained, but none of its metrics could be stored")
    assert job.output_path


def test_a_job_that_always_crashes_is_restarted_even_after_two_thousand_restarts(box):
    job_id = box.launch("steps=10 crash=0@3", max_restarts=3000, place={"hold": True})
    box.control.update(job_id, restarts=2000)
    edits.release(box.data, box.control, job_id)
    box.wait_for(lambda: box.messages(job_id, "restarting"), "a restart")
    (message,) = box.messages(job_id, "restarting")
    assert "restart 2001 of 3000 in 60 s" in message
    edits.stop(box.data, job_id)
    assert box.wait_ended(job_id).state == JobState.STOPPED

"""Tests for changing many jobs in a few transactions."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from sae_tui.jobs import bulk, edits
from trainer.contract.errors import UserError
from trainer.contract.store.database import StoreError
from trainer.contract.store.states import JobState


def test_jobs_are_changed_in_one_transaction_and_reported_once_it_is_stored(box, monkeypatch):
    monkeypatch.setattr(bulk, "LONGEST_TRANSACTION_S", 60.0)
    ids = [box.record(f"job {n}") for n in range(20)]
    seen = []

    def hold(data, control, job_id):
        seen.append(sum(job.held for job in box.control.jobs()))
        return edits.hold(data, control, job_id)

    outcomes = list(bulk.change_all(box.data, ids, hold))
    assert {one.outcome for one in outcomes} == {"done"}
    # Another connection sees none of the changes until all of them are stored.
    assert seen == [0] * 20
    assert all(job.held for job in box.control.jobs())


def test_every_job_is_changed_even_if_the_time_limit_for_a_transaction_is_short(box, monkeypatch):
    monkeypatch.setattr(bulk, "LONGEST_TRANSACTION_S", 0.0)
    ids = [box.record() for _ in range(5)]
    assert [one.id for one in bulk.change_all(box.data, ids, edits.hold)] == ids


def test_a_change_that_does_not_apply_or_fails_does_not_affect_the_others(box):
    queued, ended, other = box.record(), box.record(), box.record()
    box.control.transition(ended, JobState.STOPPED)

    def change(data, control, job_id):
        if job_id == other:
            control.update(job_id, note="half done")
            raise UserError("this failed")
        return edits.hold(data, control, job_id)

    outcomes = list(bulk.change_all(box.data, [queued, ended, other], change))
    assert [one.outcome for one in outcomes] == ["done", "skipped", "failed"]
    assert bulk.summary(outcomes, "held") == "3 jobs: 1 held, 1 skipped, 1 failed"
    assert box.job(queued).held
    assert box.job(other).note == ""


def test_a_locked_store_makes_the_change_fail_for_all_jobs(box, monkeypatch):
    ids = [box.record(), box.record()]
    with closing(sqlite3.connect(box.data.control_db, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="has been locked by another process"):
            list(bulk.change_all(box.data, ids, edits.hold))
    assert not any(job.held for job in box.control.jobs())


def test_an_empty_list_of_jobs_changes_nothing(box):
    assert list(bulk.change_all(box.data, [], edits.hold)) == []

"""Tests that training continues if the job's store fails, and that lost rows are reported."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from pathlib import Path

import pytest
from faults.conftest import LOG_EVERY, Training
from jobs.conftest import locked_store, wait_for

from trainer.contract.store.states import JobState

LOCKED_S = 30.0

pytestmark = pytest.mark.timeout(240)


def sae_of(training: Training) -> Path:
    return training.box.data.sae(training.id) / "cfg.json"


@pytest.mark.slow
def test_a_store_locked_for_30_s_loses_no_row(train) -> None:
    training = train()
    with locked_store(training.paths.metrics_db):
        training.says("metrics cannot be stored and are kept in memory for now: the store ")
        began = time.monotonic()
        while time.monotonic() - began < LOCKED_S:
            training.go_on(50)
            training.rest(2)
    job = training.stop()
    assert (job.state, job.error) == (JobState.STOPPED, None)
    steps, events, heartbeat = training.stored()
    assert steps == sorted({*range(LOG_EVERY, heartbeat.step + 1, LOG_EVERY), heartbeat.step})
    assert heartbeat.dropped == 0
    (store_event,) = [event for event in events if event.kind == "store"]
    assert store_event.level == "warning"
    assert "s; no rows were lost (" in store_event.message
    assert float(store_event.message.split()[6]) >= LOCKED_S


def test_a_deleted_store_is_recreated_and_missing_rows_are_reported(train) -> None:
    training = train()
    wait_for(lambda: len(training.stored()[0]) > 10, "rows to be stored")
    for file in training.paths.root.glob("metrics.db*"):
        file.unlink()
    training.says("metrics.db was deleted; ")
    training.go_on(100)
    assert training.stop().state == JobState.STOPPED
    steps, events, heartbeat = training.stored()
    (store_event,) = [event for event in events if event.kind == "store"]
    missing = int(store_event.message.removeprefix("metrics.db was deleted; ").split()[-1])
    assert missing >= 10 * LOG_EVERY
    assert missing <= steps[0] <= missing + LOG_EVERY
    assert steps[:-1] == list(range(steps[0], steps[-1], LOG_EVERY))
    assert steps[-1] == heartbeat.step
    assert sae_of(training).exists()


@pytest.mark.slow
def test_an_overwritten_store_is_renamed_and_recreated(train) -> None:
    training = train()
    with contextlib.closing(sqlite3.connect(training.paths.metrics_db)) as other:
        # Move the rows to the database file; otherwise, they may all still be in the write-ahead log.
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    training.paths.metrics_db.write_bytes(b"garbage " * 100_000)
    training.says("metrics.db was damaged and is kept as metrics.db.corrupt-1; ")
    training.go_on(100)
    assert training.stop().state == JobState.STOPPED
    steps, events, heartbeat = training.stored()
    assert [event.level for event in events if event.kind == "store"] == ["warning"]
    assert steps[-1] == heartbeat.step
    assert (training.paths.root / "metrics.db.corrupt-1").read_bytes().startswith(b"garbage ")
    assert sae_of(training).exists()


@pytest.mark.slow
def test_training_continues_if_the_job_list_is_locked_or_deleted(train) -> None:
    training = train(n_ranks=2)
    control_db = training.box.data.control_db
    with locked_store(control_db):
        training.go_on(300)
    supervisor = training.processes[0]
    for file in control_db.parent.glob("control.db*"):
        file.unlink()
    training.go_on(300)
    assert all(process.is_alive() for process in training.processes)
    # Send SIGTERM, as a machine does during shutdown.
    supervisor.send(15)
    wait_for(lambda: not any(process.is_alive() for process in training.processes), "all processes to exit", 60)
    assert training.paths.exit_file.exists()
    assert sae_of(training).exists()
    assert training.stored()[2].phase == "stopped"

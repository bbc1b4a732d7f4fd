"""Tests with stored times and pids from another boot, another process or a differently set clock."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from faults import clock

from sae_tui.jobs.view.reader import JobReader
from trainer.contract.store.metrics_store import Heartbeat, SeriesWriter
from trainer.contract.store.rows import Event

pytestmark = pytest.mark.timeout(240)


@pytest.mark.slow
def test_a_job_lost_in_a_reboot_gives_bitwise_identical_results_once_resumed(tmp_path, like) -> None:
    clock.machine_restarted(tmp_path / "box", like)


def test_other_processes_with_a_jobs_pids_are_not_signalled(tmp_path: Path) -> None:
    clock.pids_reused(tmp_path / "box")


@pytest.mark.slow
def test_setting_the_clock_back_an_hour_affects_neither_restarts_nor_the_event_order(tmp_path, like) -> None:
    clock.clock_set_back(tmp_path / "box", like)


@pytest.mark.slow
def test_orphaned_ranks_are_killed_even_if_the_clock_was_set_back(tmp_path: Path) -> None:
    clock.orphans_while_clock_is_set_back(tmp_path / "box")


def test_events_are_shown_in_order_of_arrival(box) -> None:
    job_id = box.record()
    paths = box.data.run(job_id)
    paths.create()
    for kind in ("first", "second"):
        box.control.add_event(job_id, kind, "of the supervisor")
    box.control._db.execute("UPDATE events SET timestamp = timestamp - ? WHERE kind = 'second'", (clock.HOUR_S,))
    with contextlib.closing(SeriesWriter(paths.metrics_db)) as writer:
        heartbeat = Heartbeat("training", 1, 10, 64, time.time())
        events = [
            Event(timestamp=time.time() - ago, level="info", kind=kind, message="of rank 0") for kind, ago in _SAID
        ]
        writer.write([], heartbeat, events)
    reader = JobReader(box.data, job_id)
    reader.poll()
    kinds = [event.kind for event in reader.events]
    reader.close()
    assert [kind for kind in kinds if kind in ("first", "second")] == ["first", "second"]
    assert [kind for kind in kinds if kind in ("third", "fourth")] == ["third", "fourth"]
    assert len(kinds) == 4


_SAID = (("third", 0), ("fourth", clock.HOUR_S))

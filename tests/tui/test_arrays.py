"""Tests for job arrays in the jobs table: the row that folds an array, and actions on all of its jobs."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.tui import record_job, wait_until

from sae_tui.panels.jobs import JobsPanel
from sae_tui.widgets.confirm import Confirm
from trainer.contract.process import ProcessRef
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

STATES = [JobState.FINISHED, JobState.FAILED, JobState.RUNNING, JobState.QUEUED, JobState.QUEUED]


@pytest.fixture
def array(data) -> int:
    """Record a job, then an array with a job in each of `STATES`, and return the array's id."""
    record_job(data, "before", JobState.FINISHED)
    me = ProcessRef.current()
    alive = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    for index, state in enumerate(STATES):
        own = alive if state is JobState.QUEUED else {}
        record_job(data, f"probe {index}", state, array=2, array_limit=1, **own)
    return 2


def table(app) -> JobsPanel:
    return app.screen.query_one(JobsPanel)


def shown(app) -> list[str]:
    """Return the table's lines without its heading."""
    return [line.strip() for line in table(app).plain.splitlines()[1:]]


def asked(app) -> str:
    assert isinstance(app.screen, Confirm)
    return str(app.screen.question)


async def ready(app, pilot) -> None:
    await wait_until(pilot, lambda: len(app.session.jobs) == 6 and len(table(app).rows) == 2)
    await pilot.pause()


async def test_an_array_is_one_row_with_the_number_of_its_jobs_in_each_state(make_app, array) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        first, last = shown(app)
        assert "▸ array 2 · 5 jobs · 1 running · 2 queued · 1 failed · 1 finished · probe" in first
        assert "━" in first
        assert last.startswith("1 before")
        assert table(app).selected_array.id == array


@pytest.mark.parametrize(("opens", "closes"), [("right", "left"), ("enter", "enter")])
async def test_a_key_unfolds_an_array_and_another_folds_it(make_app, array, opens, closes) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await ready(app, pilot)
        await pilot.press(opens)
        await wait_until(pilot, lambda: len(table(app).rows) == 7)
        assert shown(app)[0].startswith("2 ▾ array 2 · 5 jobs")
        assert [line.split()[:3] for line in shown(app)[1:3]] == [["6", "probe", "4"], ["5", "probe", "3"]]
        assert "  probe 4" in table(app).plain
        await pilot.press(closes)
        await wait_until(pilot, lambda: len(table(app).rows) == 2)


async def test_folding_an_array_from_one_of_its_jobs_selects_the_array(make_app, array) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("right", "down", "down")
        assert table(app).selected == 5
        await pilot.press("left")
        await wait_until(pilot, lambda: len(table(app).rows) == 2)
        assert table(app).selected_array.id == array


async def test_a_filter_finds_jobs_in_a_folded_array(make_app, array) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("slash", *"state:queued", "enter")
        await wait_until(pilot, lambda: [line.split()[0] for line in shown(app)] == ["6", "5"])
        assert table(app).selected == 6
        await pilot.press("escape")
        await wait_until(pilot, lambda: len(table(app).rows) == 2)
        assert table(app).selected_array.id == array


def requests(data) -> dict[int, set[str]]:
    with closing(Control(data.control_db, readonly=True)) as control:
        return {job.id: found for job in control.jobs() if (found := control.open_requests(job.id))}


def held(data) -> list[int]:
    with closing(Control(data.control_db, readonly=True)) as control:
        return sorted(job.id for job in control.jobs() if job.held)


async def test_stopping_an_array_asks_once_and_stops_all_its_active_jobs(make_app, array, data) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("s")
        await pilot.pause()
        assert asked(app) == "Stop array 2? 1 running job will save and stop; 2 queued jobs will leave the queue."
        await pilot.press("n")
        assert requests(data) == {}
        await pilot.press("s")
        await pilot.pause()
        await pilot.press("y")
        await wait_until(pilot, lambda: requests(data) == {4: {"stop"}, 5: {"stop"}, 6: {"stop"}})
        await wait_until(pilot, lambda: all(job.stop_requested for job in app.session.jobs if job.id > 3))
        await pilot.press("s")
        await pilot.pause()
        assert asked(app).startswith("All active jobs of array 2 are stopping. Kill them now?")


async def test_an_array_is_held_and_released_as_a_whole(make_app, array, data) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        for question, ids in (
            ("Hold 2 queued jobs of array 2?", [5, 6]),
            ("Release 2 held jobs of array 2?", []),
        ):
            await pilot.press("h")
            await pilot.pause()
            assert asked(app) == question
            await pilot.press("y")
            await wait_until(pilot, lambda ids=ids: held(data) == ids)
            await wait_until(pilot, lambda ids=ids: sum(job.held for job in app.session.jobs) == len(ids))
        await pilot.press("g")
        await wait_until(pilot, lambda: any("No job of array 2" in one.message for one in app._notifications))


async def test_marking_and_tagging_an_array_applies_to_all_its_jobs(make_app, array, data) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("space", "up")
        assert table(app).marked == {2, 3, 4, 5, 6}
        assert shown(app)[0].startswith("●2")
        await pilot.press("space")
        assert table(app).marked == frozenset()
        await pilot.press("up", "number_sign", *"sweep", "enter")
        await wait_until(pilot, lambda: sum("sweep" in job.tags for job in app.session.jobs) == 5)


async def test_a_launched_job_in_a_folded_array_is_selected_through_the_array(make_app, array) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("down")
        assert table(app).selected == 1
        table(app).select("6")
        app.screen.show_jobs()
        assert table(app).selected_array.id == array


async def test_a_read_only_app_offers_no_actions_on_an_array(make_app, array, data) -> None:
    app = make_app(2, readonly=True)
    async with app.run_test(size=(120, 40)) as pilot:
        await ready(app, pilot)
        await pilot.press("s", "h", "D")
        await pilot.pause()
        assert not isinstance(app.screen, Confirm)
        assert (requests(data), held(data)) == ({}, [])

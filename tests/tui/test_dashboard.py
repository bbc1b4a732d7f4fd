from __future__ import annotations

import pytest
from support.tui import StillMonitor, record_job, record_metrics, wait_until
from textual.widgets import Input

from sae_tui.gpu.simulated import Simulated
from sae_tui.panels.aggregate import AggregatePanel
from sae_tui.panels.gpus import GpuPanel
from sae_tui.panels.jobs import JobsPanel
from sae_tui.panels.status import StatusLine
from sae_tui.screens.job import JobScreen
from sae_tui.screens.launch import LaunchScreen
from sae_tui.widgets.lines import LineView
from trainer.contract.problems import Problem
from trainer.contract.process import ProcessRef
from trainer.contract.states import JobState


def text(app, panel) -> str:
    return app.screen.query_one(panel).plain


async def test_one_key_toggles_between_all_gpus_as_one_and_a_card_each(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "VRAM" in text(app, AggregatePanel)
        assert len(text(app, GpuPanel).splitlines()) == 4
        await pilot.press("v")
        assert "GPU 0 RTX 3090" in text(app, GpuPanel)
        assert len(text(app, GpuPanel).splitlines()) > 8
        await pilot.press("v")
        assert len(text(app, GpuPanel).splitlines()) == 4


async def test_the_setting_decides_which_view_comes_first(make_app) -> None:
    app = make_app(4, monitor_view_default="per_gpu")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "GPU 0 RTX 3090" in text(app, GpuPanel)


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("size", [(20, 6), (40, 12), (80, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("view", ["aggregated", "per_gpu"])
async def test_any_number_of_gpus_lays_out_at_any_size_without_overprinting(make_app, gpus, size, view) -> None:
    app = make_app(gpus, monitor_view_default=view)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        regions = [widget.region for widget in app.screen.query(LineView) if widget.display and widget.region.area]
        for number, one in enumerate(regions):
            assert one.right <= size[0]
            assert not any(one.overlaps(other) for other in regions[number + 1 :])
        for view_widget in app.screen.query(LineView):
            for y in range(view_widget.size.height):
                assert view_widget.render_line(y).cell_length == view_widget.size.width


async def test_eight_gpus_and_the_aggregate_fit_80_by_24_with_a_sparkline_each(make_app) -> None:
    app = make_app(8)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        lines = text(app, GpuPanel).splitlines()
        assert [line.split()[0] for line in lines] == list("01234567")
        assert all(set(line) & set("▁▂▃▄▅▆▇█") for line in lines)
        assert app.screen.query_one(GpuPanel).max_scroll_y == 0
        assert app.screen.query_one(AggregatePanel).region.height == 4
        assert app.screen.query_one(JobsPanel).region.height >= 4


async def test_a_lost_gpu_is_a_row_with_its_reason_and_a_missing_sensor_a_dash(make_app) -> None:
    source = Simulated(4, clock=lambda: 0.0, faults={1: "lost", 2: "no_power"})
    app = make_app(monitor=StillMonitor(source=source))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        lines = text(app, GpuPanel).splitlines()
        assert "fallen off the bus" in lines[1]
        assert "–" in lines[2]
        assert lines[3].startswith(" 3")


async def test_the_job_or_the_user_that_holds_a_gpu_is_named(make_app, data) -> None:
    record_job(data, "minilm", JobState.RUNNING, gpu_ids=(1,), gpu_uuids=("GPU-51a0-sim-1",))
    app = make_app(4)
    async with app.run_test(size=(140, 40)) as pilot:
        await wait_until(pilot, lambda: app.jobs)
        await pilot.pause()
        app.screen.show_gpus()
        lines = text(app, GpuPanel).splitlines()
        assert "job 1" in lines[1]
        assert "mallory" in lines[3]
        assert "1 active job" in text(app, StatusLine)


async def test_a_wrong_setting_is_told_and_the_app_starts_all_the_same(make_app) -> None:
    app = make_app(4, problems=(Problem("monitor_view_default", 'must be "aggregated" or "per_gpu", not 3'),))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert any("monitor_view_default" in note.message for note in app._notifications)


async def test_a_newer_store_is_said_in_the_status_line_and_the_gpus_go_on(make_app, data) -> None:
    import sqlite3

    with sqlite3.connect(data.control_db) as db:
        db.execute("PRAGMA user_version=99")
    app = make_app(4)
    async with app.run_test(size=(160, 40)) as pilot:
        await wait_until(pilot, lambda: app.watcher.problem)
        app.screen.show_gpus()
        assert "newer version" in text(app, StatusLine)
        assert len(text(app, GpuPanel).splitlines()) == 4


async def test_the_jobs_table_shows_live_progress_and_enter_opens_the_job(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id, steps=200)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.jobs and app.jobs[0].step == 200)
        await pilot.pause()
        table = text(app, JobsPanel)
        assert "▶ running" in table
        assert "50%" in table
        await pilot.press("enter")
        assert isinstance(app.screen, JobScreen)
        await pilot.press("escape")
        assert app.screen.id == "dashboard"


async def test_the_cursor_stays_on_its_job_when_a_new_one_comes_on_top(make_app, data) -> None:
    first = record_job(data, "first", JobState.FINISHED)
    record_job(data, "second", JobState.FINISHED)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(app.jobs) == 2)
        await pilot.pause()
        await pilot.press("down")
        assert app.screen.query_one(JobsPanel).selected == first
        record_job(data, "third", JobState.FINISHED)
        await wait_until(pilot, lambda: len(app.jobs) == 3)
        await pilot.pause()
        assert app.screen.query_one(JobsPanel).selected == first


async def test_stopping_asks_first_and_then_leaves_a_request_for_the_ranks(make_app, data) -> None:
    from trainer.contract.control import Control

    job_id = record_job(data, "minilm", JobState.RUNNING)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.jobs)
        await pilot.press("s")
        await pilot.press("n")
        control = Control(data.control_db, readonly=True)
        assert control.requested(job_id) == set()
        await pilot.press("s")
        await pilot.press("y")
        await wait_until(pilot, lambda: control.requested(job_id) == {"stop"})
        await wait_until(pilot, lambda: app.jobs[0].stop_requested)
        await pilot.press("s")
        assert "at once" in app.screen.question
        await pilot.press("y")
        await wait_until(pilot, lambda: "kill" in control.requested(job_id))
        control.close()


@pytest.mark.parametrize(
    ("fields", "question"),
    [
        ({}, "Cancel job 1 (minilm)? It has not started, so nothing is lost."),
        ({"held": True, "attempt": 1}, "Stop job 1 (minilm)? It is paused; what it has saved stays."),
    ],
)
async def test_stopping_a_job_in_line_promises_no_checkpoint(make_app, data, fields, question) -> None:
    me = ProcessRef.current()
    alive = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    record_job(data, "minilm", JobState.QUEUED, **alive, **fields)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.jobs)
        await pilot.press("s")
        assert app.screen.question == question


async def test_ctrl_c_says_which_key_quits_here(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        told: list[str] = []
        app.notify = lambda message, **_: told.append(message)
        await pilot.press("ctrl+c")
        await wait_until(pilot, lambda: told == ["Press q to quit; jobs keep running."])
        # In a field q is a letter, and Ctrl-C copies.
        await pilot.press("slash")
        await wait_until(pilot, lambda: isinstance(app.focused, Input))
        app.action_help_quit()
        assert told[1:] == ["Press ctrl+q to quit; jobs keep running."]


async def test_help_lists_every_key_of_the_screen(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("question_mark")
        shown = app.screen._keys()
        assert "Aggregated view or a card per GPU" in shown
        assert "Choose GPUs and launch a training" in shown
        await pilot.press("escape")
        assert app.screen.id == "dashboard"


async def test_n_opens_the_launch_screen_and_escape_leads_back(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("n")
        assert isinstance(app.screen, LaunchScreen)
        await pilot.press("escape")
        assert app.screen.id == "dashboard"


async def test_names_with_markup_are_shown_as_they_are(make_app, data) -> None:
    record_job(data, "[red]evil[/red] [/]", JobState.RUNNING)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.jobs)
        await pilot.pause()
        assert "[red]evil[/red] [/]" in text(app, JobsPanel)
        await pilot.press("s")
        await pilot.pause()
        assert "[red]evil[/red] [/]" in str(app.screen.query_one("#question").render())

"""Tests for the dashboard's panels: the processes, the lower part, keys, focus and frames."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.combinations import slow_except
from support.scenes import lively_monitor
from support.tui import StillMonitor, record_job, title_of, wait_until
from textual._compositor import LayoutUpdate

from sae_tui.gpu.base import GpuProcess
from sae_tui.panels.jobs import MARK, JobsPanel
from sae_tui.panels.processes import ProcessTable
from sae_tui.screens.dashboard_panels import DashboardProcesses
from sae_tui.screens.process_page import ProcessPage
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.reading import Page
from trainer.contract.process import ProcessRef
from trainer.contract.store.states import JobState

SMALL, MIDDLE, LARGE = (80, 24), (120, 40), (200, 60)


def processes(app) -> str:
    return app.screen.query_one("#work-processes ProcessTable", ProcessTable).plain


def shown(app) -> set[str]:
    """Return the ids of the visible panels."""
    panels = app.screen.query("#gpus, #work-processes, #finder, #preview")
    return {str(panel.id) for panel in panels if panel.is_on_screen and panel.display}


def hint(app, name: str) -> str:
    """Return the key hints in a panel's frame."""
    panel = app.screen.query_one(name)
    return panel._border_subtitle.plain if panel._border_subtitle else title_of(panel)


@pytest.mark.parametrize("size", [SMALL, MIDDLE, LARGE])
async def test_the_processes_are_shown_below_the_gpus_at_every_size(make_app, size) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: "python train.py" in processes(app))
        assert {"USER", "GPU", "MEMORY", "SM", "CPU", "TIME", "COMMAND"} <= set(processes(app).replace("▼", "").split())
        row = next(line for line in processes(app).splitlines() if "train.py" in line)
        assert row.split()[1:3] == ["mallory", "3"]
        gpus, work = (app.screen.query_one(name).region for name in ("#gpus", "#work-processes"))
        assert gpus.bottom == work.y


async def test_a_process_that_belongs_to_a_job_names_the_job(make_app, data) -> None:
    own = ProcessRef.current()
    job_id = record_job(data, "mine", JobState.RUNNING, gpu_ids=(0,), gpu_uuids=("u",), supervisor=own)
    app = make_app(monitor=lively_monitor(2, busy=(0,), pid=own.pid))
    async with app.run_test(size=MIDDLE) as pilot:
        await wait_until(pilot, lambda: f"job {job_id}" in processes(app))


async def test_tab_reaches_the_processes_and_enter_opens_one(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=MIDDLE) as pilot:
        await wait_until(pilot, lambda: "python train.py" in processes(app))
        await pilot.press("tab", "tab")
        assert isinstance(app.focused, ProcessTable)
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ProcessPage))
        await pilot.press("escape", "t")
        assert app.screen.name == "processes"


async def test_no_signal_can_be_sent_from_the_dashboard(make_app, data) -> None:
    record_job(data, "runs", JobState.RUNNING)
    app = make_app(4)
    async with app.run_test(size=MIDDLE) as pilot:
        await wait_until(pilot, lambda: app.session.jobs and "python train.py" in processes(app))
        await pilot.press("tab", "tab", "s", "A", "D")
        assert app.screen.id == "dashboard"
        assert not {"Stop", "Signal", "Delete"} & set(app.screen.query_one(Footer).plain.split())


async def test_space_marks_no_process_on_the_dashboard(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=MIDDLE) as pilot:
        await wait_until(pilot, lambda: "python train.py" in processes(app))
        await pilot.press("tab", "tab", "space")
        assert isinstance(app.focused, ProcessTable)
        assert MARK not in processes(app)


async def test_keys_for_jobs_act_only_while_the_jobs_have_the_focus(make_app, data) -> None:
    record_job(data, "runs", JobState.RUNNING)
    app = make_app(4)
    async with app.run_test(size=MIDDLE) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        for key in ("s", "p", "l", "y"):
            await pilot.press("tab", key)
            assert app.screen.id == "dashboard"
            await pilot.press("shift+tab")
        await pilot.press("s")
        await wait_until(pilot, lambda: app.screen.is_modal)


async def test_process_shares_are_read_only_while_the_panel_is_displayed(make_app) -> None:
    app = make_app(4)
    monitor = app.session.monitor
    async with app.run_test(size=MIDDLE) as pilot:
        await wait_until(pilot, lambda: monitor.shares_wanted)
        await pilot.press("comma")
        await wait_until(pilot, lambda: not monitor.shares_wanted)
        await pilot.press("escape")
        await wait_until(pilot, lambda: monitor.shares_wanted)
        await pilot.press("z", "z")  # shows only the jobs
        assert not app.screen.query_one(DashboardProcesses).display
        assert not monitor.shares_wanted


async def test_process_shares_are_read_without_a_break_when_a_process_page_is_opened(make_app) -> None:
    wanted: list[bool] = []

    class Recorded(StillMonitor):
        def want_shares(self, is_wanted: bool, *, every_sample: bool = False) -> None:
            wanted.append(is_wanted)

    app = make_app(monitor=Recorded(4))
    async with app.run_test(size=MIDDLE) as pilot:
        await wait_until(pilot, lambda: "python train.py" in processes(app))
        await pilot.press("tab", "tab")
        wanted.clear()
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, ProcessPage) and app.screen.query(Page))
        await pilot.pause()
        assert set(wanted) == {True}


@pytest.mark.parametrize("size", [SMALL, MIDDLE])
async def test_a_key_gives_the_lower_part_to_one_panel_after_another(make_app, data, size) -> None:
    for place in range(12):
        record_job(data, f"old {place}", JobState.FINISHED)
    app = make_app(8)
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: app.session.jobs and "python train.py" in processes(app))
        await pilot.press("z")
        assert shown(app) == {"gpus", "work-processes"}
        assert isinstance(app.focused, ProcessTable)
        await pilot.press("z")
        assert shown(app) - {"preview"} == {"gpus", "finder"}
        assert isinstance(app.focused, JobsPanel)
        await pilot.press("z")
        assert shown(app) == {"gpus"}
        assert app.focused is app.screen.query_one("#gpus")
        await pilot.press("z")
        assert {"gpus", "work-processes", "finder"} <= shown(app)


async def test_the_focus_leaves_a_panel_that_becomes_too_small_to_show(make_app, data) -> None:
    record_job(data, "runs", JobState.RUNNING)
    app = make_app(8)
    async with app.run_test(size=MIDDLE) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("tab", "tab")
        assert isinstance(app.focused, ProcessTable)
        await pilot.resize_terminal(80, 20)
        await wait_until(pilot, lambda: isinstance(app.focused, JobsPanel))


@pytest.mark.parametrize("tabs", [0, 1, 2])
async def test_the_focus_returns_to_its_panel_after_a_gpu_is_opened_and_closed(make_app, tabs) -> None:
    app = make_app(4)
    async with app.run_test(size=MIDDLE) as pilot:
        await pilot.press(*["tab"] * tabs)
        before = app.focused
        await pilot.press("2")
        await wait_until(pilot, lambda: app.screen.name == "gpu")
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.screen.id == "dashboard")
        assert app.focused is before


@pytest.mark.parametrize("size", [SMALL, MIDDLE])
async def test_frames_show_the_keys_of_their_panel_and_the_focus_without_colour(make_app, size) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: "V view" in hint(app, "#gpus"))
        assert "/ filter" in hint(app, "#finder")
        assert "/ filter" not in hint(app, "#work-processes")
        edges = {name: app.screen.query_one(name).styles.border_top[0] for name in ("#gpus", "#finder")}
        assert edges["#finder"] == "heavy" != edges["#gpus"]
        await pilot.press("tab", "tab")
        app.screen.show_gpus()
        assert "/ filter" in hint(app, "#work-processes")
        assert "/ filter" not in hint(app, "#finder")


async def test_a_machine_without_gpus_shows_no_process_panel(make_app) -> None:
    monitor = StillMonitor(1)
    monitor._latest, monitor._rings = (), []
    app = make_app(monitor=monitor)
    async with app.run_test(size=MIDDLE) as pilot:
        await pilot.pause()
        assert "work-processes" not in shown(app)
        assert not monitor.shares_wanted


@pytest.mark.parametrize("key", slow_except(["", "n", "t"], ["", "n", "comma", "exclamation_mark", "t"]))
async def test_a_key_reads_the_gpus_and_repaints_the_screen_on_every_screen(make_app, monkeypatch, key) -> None:
    app = make_app(4)
    whole: list[object] = []
    async with app.run_test(size=MIDDLE) as pilot:
        await pilot.press(*filter(None, [key]))
        await pilot.pause()
        lighten = app._painter.lighten

        def watch(screen, update):
            whole.append(isinstance(update, LayoutUpdate) and lighten(screen, update) is update)
            return update

        monkeypatch.setattr(app._painter, "lighten", watch)
        before = app.session.monitor.latest()[0].timestamp
        await pilot.press("ctrl+n")
        await wait_until(pilot, lambda: any(whole))
        assert app.session.monitor.latest()[0].timestamp > before


async def test_the_process_panel_grows_as_soon_as_more_processes_are_listed(make_app, data) -> None:
    for place in range(12):
        record_job(data, f"old {place}", JobState.FINISHED)
    monitor = lively_monitor(8, busy=())
    app = make_app(monitor=monitor)
    async with app.run_test(size=MIDDLE) as pilot:
        panel = app.screen.query_one(DashboardProcesses)
        await wait_until(pilot, lambda: app.session.jobs and panel.n_rows == 1)
        before = panel.size.height
        many = tuple(GpuProcess(4_190_000 + place, "ada", "python", 1 << 30) for place in range(7))
        monitor._latest = (replace(monitor._latest[0], processes=many), *monitor._latest[1:])
        app.screen.show_gpus()
        await wait_until(pilot, lambda: panel.size.height > before)
        assert all(str(one.pid) in processes(app) for one in many)


async def test_the_cursor_starts_on_a_running_job_below_queued_jobs(make_app, data) -> None:
    running = record_job(data, "runs", JobState.RUNNING)
    record_job(data, "waits", JobState.QUEUED, supervisor=ProcessRef.current())
    app = make_app(4)
    async with app.run_test(size=MIDDLE) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 2)
        await wait_until(pilot, lambda: app.screen.query_one(JobsPanel).selected == running)

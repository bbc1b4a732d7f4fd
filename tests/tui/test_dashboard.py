from __future__ import annotations

import itertools
import re
import threading
from dataclasses import replace

import pytest
from support.combinations import slow_unless
from support.features import features_file
from support.tui import StillMonitor, put_into_row, record_job, record_metrics, wait_until
from textual.geometry import Region
from textual.widgets import Input

from sae_tui.gpu.nvml_faults import NO_LIBRARY, source
from sae_tui.gpu.simulated import Simulated, uuid_of
from sae_tui.jobs.view import watcher
from sae_tui.panels.aggregate import AggregatePanel
from sae_tui.panels.gpus import GpuPanel
from sae_tui.panels.jobs import JobsPanel
from sae_tui.panels.status import StatusLine
from sae_tui.screens import dashboard
from sae_tui.screens.features import FeaturesScreen
from sae_tui.screens.job import JobScreen
from sae_tui.screens.launch import LaunchScreen
from sae_tui.widgets.footer import Footer
from sae_tui.widgets.lines import LineView
from trainer.contract.errors import Problem
from trainer.contract.process import ProcessRef
from trainer.contract.runs.features import FEATURES
from trainer.contract.store.states import JobState


class NoGpus(StillMonitor):
    """A monitor that finds no GPUs."""

    def __init__(self) -> None:
        super().__init__(1)
        self._latest = ()
        self._rings = []


def text(app, panel) -> str:
    return app.screen.query_one(panel).plain


def gpus(app) -> list[str]:
    """Return the text for each GPU, with its two lines joined into one."""
    lines = text(app, GpuPanel).splitlines()
    return [f"{one.rstrip()} {other.strip()}" for one, other in zip(lines[::2], lines[1::2], strict=True)]


async def test_one_key_switches_between_lines_cards_and_a_map(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "Utilisation 25%" in text(app, AggregatePanel)
        assert len(gpus(app)) == 4
        await pilot.press("V")
        assert "GPU 0 RTX 3090" in text(app, GpuPanel)
        assert len(text(app, GpuPanel).splitlines()) > 8
        await pilot.press("V")
        assert text(app, GpuPanel).split()[:3] == ["0", "0%", "1"]
        await pilot.press("V")
        assert len(gpus(app)) == 4


async def test_a_gpu_shows_its_job_as_soon_as_the_job_is_listed(make_app, data) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "idle" in text(app, GpuPanel).splitlines()[0]
        record_job(data, "mine", JobState.STARTING, gpu_ids=(0,), gpu_uuids=(uuid_of(0),))
        # The app must show the job before the next sample, which is taken only a minute later.
        await wait_until(pilot, lambda: "job 1 (mine)" in text(app, GpuPanel).splitlines()[0])


async def test_the_status_line_reports_hidden_gpus(make_app) -> None:
    app = make_app(4)
    app.session.monitor.hidden = "4 of 8 GPUs, by CUDA_VISIBLE_DEVICES"
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "4 of 8 GPUs, by CUDA_VISIBLE_DEVICES · 0 running · 0 waiting" in text(app, StatusLine)


async def test_a_setting_chooses_the_initial_view(make_app) -> None:
    app = make_app(4, monitor_view_default="per_gpu")
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert "GPU 0 RTX 3090" in text(app, GpuPanel)


def regions(app) -> list[Region]:
    return [widget.region for widget in app.screen.query(LineView) if widget.display and widget.region.area]


def are_apart(found: list[Region]) -> bool:
    return not any(one.overlaps(other) for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize(
    ("view", "size", "gpus"),
    slow_unless(
        lambda view, size, gpus: (size[0] <= 80 and gpus == 16) or (gpus, size) in ((1, (80, 24)), (4, (200, 60))),
        itertools.product(
            ("aggregated", "per_gpu"), ((20, 6), (40, 12), (80, 24), (120, 40), (200, 60)), (1, 2, 3, 4, 5, 8, 13, 16)
        ),
    ),
)
async def test_any_number_of_gpus_fits_any_window_size_without_overlap(make_app, gpus, size, view) -> None:
    app = make_app(gpus, monitor_view_default=view)
    async with app.run_test(size=size) as pilot:
        # Panels are resized when their content arrives, so the layout can change after the first draw.
        await wait_until(pilot, lambda: are_apart(regions(app)))
        assert all(one.right <= size[0] for one in regions(app))
        for view_widget in app.screen.query(LineView):
            for y in range(view_widget.size.height):
                assert view_widget.render_line(y).cell_length == view_widget.size.width


async def test_eight_gpus_with_their_users_and_the_totals_fit_80_by_24(make_app) -> None:
    app = make_app(8)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        lines = text(app, GpuPanel).splitlines()
        assert [line.split()[0] for line in lines] == list("01234567")
        assert all("used by mallory" in line for line in (lines[3], lines[7]))
        assert lines[0].endswith("idle".ljust(18))
        assert app.screen.query_one(GpuPanel).max_scroll_y == 0
        assert app.screen.query_one(AggregatePanel).size.height == 4
        assert app.screen.query_one(JobsPanel).region.height >= 4


async def test_a_lost_gpu_is_listed_with_its_reason_and_a_missing_sensor_shows_a_dash(make_app) -> None:
    source = Simulated(4, clock=lambda: 0.0, faults={1: "lost", 2: "no_power"})
    app = make_app(monitor=StillMonitor(source=source))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        lines = gpus(app)
        assert "fallen off the bus" in lines[1]
        assert "–" in lines[2]
        assert lines[3].startswith(" 3")
        assert "4 GPUs, 1 lost · 0 running" in text(app, StatusLine)
        sums = text(app, AggregatePanel)
        assert "23.7 / 58.0 GiB · 3 of 4 GPUs" in sums
        assert "W / 700 W · 2 of 4 GPUs" in sums
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        assert "23.7 / 58.0 GiB · 3 of 4 " in text(app, AggregatePanel)
        assert "cards" not in text(app, AggregatePanel)
        await pilot.press("V")
        gpu = text(app, GpuPanel)
        assert "the GPU has fallen off the bus; a" in gpu
        assert "reboot is needed" in gpu


async def test_held_and_queued_jobs_are_shown_as_waiting_and_a_silent_gpu_is_not_lost(make_app, data) -> None:
    record_job(data, "minilm", JobState.RUNNING)
    record_job(data, "minilm", JobState.FINISHED)
    record_job(data, "minilm", JobState.QUEUED, host="elsewhere")
    record_job(data, "minilm", JobState.QUEUED, host="elsewhere", held=True)
    monitor = StillMonitor(2)
    first, second = monitor._latest
    monitor._latest = (first, replace(second, healthy=False, reason="has not answered for 6 s"))
    app = make_app(monitor=monitor)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 4)
        await pilot.pause()
        assert "2 GPUs, 1 unreadable · 1 running · 2 waiting" in text(app, StatusLine)


@pytest.mark.parametrize(
    ("width", "shown"),
    [(80, "used by mallory (…"), (99, "used by mallory (pid 3…")],
)
async def test_a_gpus_user_is_named_as_far_as_space_allows(make_app, width, shown) -> None:
    app = make_app(4)
    async with app.run_test(size=(width, 40)) as pilot:
        await pilot.pause()
        lines = text(app, GpuPanel).splitlines()
        assert lines[3].endswith(shown)
        assert max(map(len, lines)) <= width
        assert "▁" in lines[0]


@pytest.mark.parametrize("width", [110, 120, 200])
async def test_with_two_lines_a_gpu_shows_its_user_power_limit_and_history(make_app, width) -> None:
    app = make_app(4)
    async with app.run_test(size=(width, 40)) as pilot:
        await pilot.pause()
        idle, *_, busy = gpus(app)
        assert "idle" in idle
        assert "▁" in idle
        assert "P8 210 MHz" in idle
        assert "fan 30%" in idle
        assert "23.1Gi free" in idle
        assert re.search(r"used by mallory \(pid (31415, )?.*of 350 W slowed: power limit", busy)


async def test_a_long_description_of_the_holder_continues_on_the_second_line(make_app) -> None:
    monitor = StillMonitor(4)
    monitor._latest = tuple(replace(sample, condition=None) for sample in monitor._latest)
    app = make_app(monitor=monitor)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        *_, busy = gpus(app)
        assert re.search(r"used by mallory \(pid 31415, .*of 350 W python train.py\)", busy)
        assert "MHz" not in busy


async def test_gpus_that_do_not_fit_are_counted_and_can_be_reached_with_keys(make_app) -> None:
    app = make_app(16)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        lines = text(app, GpuPanel).splitlines()
        assert len(lines) == app.screen.query_one(GpuPanel).size.height == 10
        assert "▼ 7 more" in lines[-1]
        await pilot.press("right_square_bracket")
        lines = text(app, GpuPanel).splitlines()
        assert [line.split()[0] for line in lines[:-1]] == [str(index) for index in range(7, 16)]
        assert "▲ 7 more" in lines[-1]
        await pilot.press("right_square_bracket", "left_square_bracket")
        assert text(app, GpuPanel).splitlines()[0].startswith(" 0")
        await pilot.resize_terminal(50, 24)
        await pilot.press("V", "right_square_bracket")
        lines = text(app, GpuPanel).splitlines()
        assert lines[0].startswith(" GPU 7")
        assert lines[-1].startswith("   ▲ 7 more  ▼ 2 more  (keys")


async def test_no_gpu_is_reported_missing_while_the_driver_opens(make_app) -> None:
    monitor = NoGpus()
    monitor.opening = True
    app = make_app(monitor=monitor)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        assert text(app, GpuPanel).strip() == "asking the driver…"
        assert "asking the driver… · 0 running · 0 waiting" in text(app, StatusLine)
        assert "0 GPUs" not in text(app, StatusLine)


async def test_without_gpus_the_panel_shows_the_full_reason_and_the_remedy(make_app) -> None:
    monitor = NoGpus()
    monitor.problem = str(source(NO_LIBRARY))
    app = make_app(monitor=monitor)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        said = " ".join(text(app, GpuPanel).split())
        assert said.startswith("There is no NVIDIA driver library (libnvidia-ml.so.1); install the NVIDIA driver, or")
        assert said.endswith(" --gpus all. d: why, and what to do · sae-tui --demo: simulated GPUs")
        assert "0 GPUs · 0 running" in text(app, StatusLine)


async def test_without_gpus_the_panel_names_no_keys_for_gpus(make_app) -> None:
    for monitor, is_named in ((NoGpus(), False), (StillMonitor(2), True)):
        app = make_app(monitor=monitor)
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.pause()
            shown = "\n".join(strip.text for strip in app.screen._compositor.render_strips())
            assert ("V view · 0…9 one GPU" in shown) is is_named


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_an_empty_dashboard_shows_the_first_steps_with_their_keys(make_app, monkeypatch, size) -> None:
    async def steps(monitor, **flags) -> list[str]:
        app = make_app(monitor=monitor, **flags)
        async with app.run_test(size=size) as pilot:
            await wait_until(pilot, lambda: "See " in text(app, JobsPanel))
            return [line.strip(" \n") for line in text(app, JobsPanel).splitlines()[1:]]

    train = "Train    n, then ctrl+l: a first SAE on the sample data (about a minute)"
    extract = "Extract  X: activations of a language model, to train SAEs on"
    run = "Run      r: any program as a job, in the queue for the GPUs"
    none = "See      no GPU here, so jobs run on the CPU; key , adds GPUs on other hosts"
    assert await steps(NoGpus()) == [none, extract, train, run]
    assert await steps(StillMonitor(8)) == [
        "See      0…9: one GPU · t: GPU processes · V: other views", extract, train, run
    ]  # fmt: skip
    assert "read-only: the app was started with --readonly" in (await steps(NoGpus(), readonly=True))[1]
    monkeypatch.setattr(dashboard, "missing_of_trainer", lambda: ["torch"])
    remedy = "PyTorch is missing: pip install 'sae-tui[train]'"
    assert await steps(NoGpus()) == [none, f"Extract  {remedy}", f"Train    {remedy}", run]


@pytest.mark.slow
async def test_a_changed_draft_is_kept_while_another_kind_of_job_is_filled_in(make_app) -> None:
    app = make_app()

    def shows(name: str):
        return lambda: (
            app.screen.name == "launch" and app.screen.form.review.job and app.screen.form.review.job.name == name
        )

    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("X")
        await wait_until(pilot, shows("gpt2-activations"))
        await pilot.press("escape", "n")
        await wait_until(pilot, shows("quick"))
        await put_into_row(pilot, "name", "mine")
        await pilot.press("escape", "X")
        await wait_until(pilot, shows("gpt2-activations"))
        # `n` reopens the last form if it has changes, even if it is for another kind of job.
        await put_into_row(pilot, "name", "rows")
        await wait_until(pilot, shows("rows"))
        await pilot.press("escape", "n")
        await wait_until(pilot, shows("rows"))
        await pilot.press("f7")
        await wait_until(pilot, shows("mine"))


async def test_f_opens_the_features_of_a_job_that_has_them(make_app, data) -> None:
    with_some = record_job(data, "some", JobState.FINISHED)
    record_job(data, "none", JobState.FINISHED)
    data.sae(with_some).mkdir(parents=True)
    (data.sae(with_some) / FEATURES).write_bytes(features_file())
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 2)
        await wait_until(pilot, lambda: "n New job" in text(app, Footer))
        assert "f Features" not in text(app, Footer)
        await pilot.press("f")
        assert "`sae-tui eval 2` finds its max-activating examples" in str([*app.notices][-1].message)
        await pilot.press("down")
        await wait_until(pilot, lambda: "f Features" in text(app, Footer))
        await pilot.press("f")
        await wait_until(pilot, lambda: isinstance(app.screen, FeaturesScreen))


async def test_the_dashboard_is_updated_behind_help_and_dialogs(make_app, data) -> None:
    record_job(data, "minilm", JobState.RUNNING)
    monitor = StillMonitor(4)
    app = make_app(monitor=monitor)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        for key, leave in (("question_mark", "escape"), ("s", "n")):
            await pilot.press(key)
            before = app.router.dashboard.query_one(GpuPanel).plain
            monitor.step()
            monitor.step()
            app.redraw.show_gpus()
            assert app.router.dashboard.query_one(GpuPanel).plain != before
            await pilot.press(leave)
        assert app.screen is app.router.dashboard


async def test_a_gpu_shows_the_job_or_user_holding_it(make_app, data) -> None:
    record_job(data, "minilm", JobState.RUNNING, gpu_ids=(1,), gpu_uuids=("GPU-51a0-sim-1",))
    app = make_app(4)
    async with app.run_test(size=(140, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.pause()
        app.screen.show_gpus()
        lines = gpus(app)
        assert "job 1" in lines[1]
        assert "mallory" in lines[3]
        assert "4 GPUs · 1 running · 0 waiting" in text(app, StatusLine)


async def test_an_invalid_setting_is_reported_and_the_app_still_starts(make_app) -> None:
    app = make_app(4, problems=(Problem("monitor_view_default", 'must be "aggregated" or "per_gpu", not 3'),))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        assert any("monitor_view_default" in note.message for note in app._notifications)


async def test_a_store_from_a_newer_version_is_reported_and_the_gpus_are_still_shown(make_app, data) -> None:
    import sqlite3

    with sqlite3.connect(data.control_db) as db:
        db.execute("PRAGMA user_version=99")
    app = make_app(4)
    async with app.run_test(size=(160, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.watcher.problem)
        app.screen.show_gpus()
        assert "newer version" in text(app, StatusLine)
        assert len(gpus(app)) == 4


async def test_the_status_line_reports_a_hung_disk_and_the_age_of_the_list(make_app, data, monkeypatch) -> None:
    may_continue, poll = threading.Event(), watcher.JobsReader.poll
    monkeypatch.setattr(watcher.JobsReader, "poll", lambda reader: (may_continue.wait(60), poll(reader))[1])
    monkeypatch.setattr(watcher, "SILENT_AFTER_S", 0.1)
    app = make_app(4)
    async with app.run_test(size=(160, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.watcher.problem)
        app.screen.show_gpus()
        assert re.search(r"the jobs have not been read for \d+ s: the disk of", text(app, StatusLine))
        may_continue.set()
        monkeypatch.setattr(watcher, "SILENT_AFTER_S", 60)
        await wait_until(pilot, lambda: not app.session.watcher.problem)


async def test_the_jobs_table_shows_live_progress_and_enter_opens_the_job(make_app, data) -> None:
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id, steps=200)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs and app.session.jobs[0].step == 200)
        await pilot.pause()
        table = text(app, JobsPanel)
        assert "▶ running" in table
        assert "50%" in table
        await pilot.press("enter")
        assert isinstance(app.screen, JobScreen)
        await pilot.press("escape")
        assert app.screen.id == "dashboard"


async def test_the_cursor_stays_on_its_job_when_a_new_job_appears_above(make_app, data) -> None:
    first = record_job(data, "first", JobState.FINISHED)
    record_job(data, "second", JobState.FINISHED)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 2)
        await pilot.pause()
        await pilot.press("down")
        assert app.screen.query_one(JobsPanel).selected == first
        record_job(data, "third", JobState.FINISHED)
        await wait_until(pilot, lambda: len(app.session.jobs) == 3)
        await pilot.pause()
        assert app.screen.query_one(JobsPanel).selected == first


async def test_stopping_needs_confirmation_and_then_stores_a_request_for_the_ranks(make_app, data) -> None:
    from trainer.contract.store.job_store import Control

    job_id = record_job(data, "minilm", JobState.RUNNING)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("s")
        await pilot.press("n")
        control = Control(data.control_db, readonly=True)
        assert control.open_requests(job_id) == set()
        await pilot.press("s")
        await pilot.press("y")
        await wait_until(pilot, lambda: control.open_requests(job_id) == {"stop"})
        await wait_until(pilot, lambda: app.session.jobs[0].stop_requested)
        await pilot.press("s")
        assert "Kill it now?" in app.screen.question
        await pilot.press("y")
        await wait_until(pilot, lambda: "kill" in control.open_requests(job_id))
        control.close()


@pytest.mark.parametrize(
    ("fields", "question"),
    [
        ({}, "Cancel job 1 (minilm)? It has not started, so nothing is lost."),
        ({"held": True, "attempt": 1}, "Stop job 1 (minilm)? It is paused; it keeps what it has saved."),
    ],
)
async def test_stopping_a_queued_job_does_not_promise_a_checkpoint(make_app, data, fields, question) -> None:
    me = ProcessRef.current()
    alive = {"supervisor_pid": me.pid, "supervisor_start": me.start_ticks, "boot_id": me.boot_id}
    record_job(data, "minilm", JobState.QUEUED, **alive, **fields)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("s")
        assert app.screen.question == question


async def test_ctrl_c_shows_which_key_quits(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        messages: list[str] = []
        app.notify = lambda message, **_: messages.append(message)
        await pilot.press("ctrl+c")
        await wait_until(pilot, lambda: messages == ["Press q to quit; jobs keep running."])
        # In a text field, q types a letter and ctrl+c copies.
        await pilot.press("slash")
        await wait_until(pilot, lambda: isinstance(app.focused, Input))
        app.action_help_quit()
        assert messages[1:] == ["Press ctrl+q to quit; jobs keep running."]


async def test_help_lists_every_key_on_the_screen(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("question_mark")
        shown = app.screen.query_one("Page").plain
        assert "Lines, card view or map" in shown
        assert "Choose GPUs and launch a job" in shown
        await pilot.press("escape")
        assert app.screen.id == "dashboard"


async def test_n_opens_the_launch_screen_and_escape_returns(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("n")
        assert isinstance(app.screen, LaunchScreen)
        await pilot.press("escape")
        assert app.screen.id == "dashboard"


async def test_names_with_markup_are_shown_literally(make_app, data) -> None:
    record_job(data, "[red]evil[/red] [/]", JobState.RUNNING)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.pause()
        assert "[red]evil[/red] [/]" in text(app, JobsPanel)
        await pilot.press("s")
        await pilot.pause()
        assert "[red]evil[/red] [/]" in str(app.screen.query_one("#question").render())


async def test_the_preview_follows_no_job_while_another_screen_is_shown(make_app, data) -> None:
    shown, selected = (record_job(data, name, JobState.RUNNING) for name in ("shown", "selected"))
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        dashboard = app.screen
        await wait_until(pilot, lambda: dashboard.query_one(JobsPanel).selected == selected)
        app.session.go.open_job(shown)
        await wait_until(pilot, lambda: app.session.detail and app.session.detail.view.id == shown)
        dashboard._follow_selected()
        await pilot.pause(0.5)
        assert app.session.detail.view.id == shown


async def test_a_key_for_a_gpu_or_a_job_that_does_not_exist_says_so(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        for key, words in (("9", "There is no GPU 9."), ("y", "There is no job yet; n launches one.")):
            await pilot.press(key)
            await wait_until(pilot, lambda words=words: any(words in one.message for one in app.notices))


async def test_a_selected_row_outside_the_window_is_scrolled_into_view(make_app, data) -> None:
    ids = [record_job(data, f"job-{number}", JobState.FINISHED) for number in range(40)]
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: len(app.session.jobs) == 40)
        await pilot.pause()
        await pilot.press("end")
        table = app.screen.query_one(JobsPanel)
        assert table.scroll_y > 0
        app.screen.select(ids[-1])  # the newest job is the first row
        await pilot.pause()
        assert table.cursor == str(ids[-1])
        assert table.scroll_y == 0
        app.screen.select(ids[0])
        await pilot.pause()
        assert table.scroll_y > 0

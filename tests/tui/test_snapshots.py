"""Compares screens with snapshots; `pytest tests/tui/test_snapshots.py --snapshot-update` updates them."""

from __future__ import annotations

import pytest
from support.scenes import FINDINGS, SCENES, lively_monitor, record_box, record_sweep, show_dashboard
from support.tui import put_into_row, wait_until

from sae_tui.panels import gpu_picker
from sae_tui.screens.compare import CompareScreen
from sae_tui.screens.doctor import DoctorScreen
from sae_tui.widgets.menu import Menu

SMALL, LARGE = (80, 24), (120, 40)


@pytest.fixture
def box(data) -> int:
    return record_box(data)


@pytest.fixture(autouse=True)
def _as_many_cores_on_every_machine(monkeypatch) -> None:
    monkeypatch.setattr(gpu_picker, "_cores", lambda: 2)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
@pytest.mark.parametrize("view", ["aggregated", "per_gpu"])
@pytest.mark.parametrize("gpus", [4, 8])
def test_the_dashboard_matches_its_snapshot(snap_compare, make_app, box, size, view, gpus) -> None:
    app = make_app(monitor=lively_monitor(gpus, {5: "lost", 6: "no_power"}), monitor_view_default=view)
    assert snap_compare(app, terminal_size=size, run_before=show_dashboard)


def test_the_dashboard_in_light_colours_matches_its_snapshot(snap_compare, make_app, box) -> None:
    app = make_app(monitor=lively_monitor(), theme="light")
    assert snap_compare(app, terminal_size=LARGE, run_before=show_dashboard)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
def test_the_launch_screen_matches_its_snapshot(snap_compare, make_app, size) -> None:
    app = make_app(monitor=lively_monitor(4, {2: "lost"}, busy=()))

    async def ready(pilot) -> None:
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen.name == "launch" and "GPU" in app.screen.form.review.text)
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=ready)


def test_the_launch_screen_with_an_invalid_value_matches_its_snapshot(snap_compare, make_app) -> None:
    app = make_app(monitor=lively_monitor(busy=()))

    async def ready(pilot) -> None:
        await pilot.press("n")
        await wait_until(pilot, lambda: app.screen.name == "launch" and "GPU" in app.screen.form.review.text)
        await put_into_row(pilot, "sae-k", "0")
        await wait_until(pilot, lambda: app.screen.form.review.errors)
        await pilot.pause()

    assert snap_compare(app, terminal_size=LARGE, run_before=ready)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
def test_the_settings_match_their_snapshot(snap_compare, make_app, data, size) -> None:
    data.settings_file.write_text('theme = "light"\nnotify = "drum"\nprice_per_kwh = 0.31\n')
    app = make_app(monitor=lively_monitor())

    async def ready(pilot) -> None:
        await pilot.press("comma")
        await wait_until(pilot, lambda: app.screen.name == "settings")
        await wait_until(pilot, lambda: isinstance(app.focused, Menu))
        # The path of the real data folder differs between test runs.
        app.screen._path = "~/.local/share/sae-tui/settings.toml"
        app.screen._entitle()
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=ready)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
def test_the_screen_of_a_job_matches_its_snapshot(snap_compare, make_app, box, size) -> None:
    app = make_app(monitor=lively_monitor())

    async def ready(pilot) -> None:
        await wait_until(pilot, lambda: app.session.jobs and app.session.jobs[0].step == 200)
        app.session.go.open_job(box)
        await wait_until(pilot, lambda: app.session.detail is not None and app.session.detail.log)
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=ready)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
def test_the_comparison_matches_its_snapshot(snap_compare, make_app, data, size) -> None:
    ids = record_sweep(data)
    app = make_app(monitor=lively_monitor())

    async def ready(pilot) -> None:
        screen = CompareScreen(app.session, ids)
        app.session.go.show(screen)
        await wait_until(pilot, lambda: len(screen.comparison.curves) == 3)
        await pilot.pause()

    assert snap_compare(app, terminal_size=size, run_before=ready)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "120x40"])
@pytest.mark.parametrize("name", ["text", "steer"])
def test_the_screens_with_a_language_model_match_their_snapshot(snap_compare, data, size, name) -> None:
    (scene,) = (one for one in SCENES if one.name == name)
    assert snap_compare(scene.app(data), terminal_size=size, run_before=scene.show)


def test_the_confirmation_before_a_job_is_stopped_matches_its_snapshot(snap_compare, make_app, box) -> None:
    app = make_app(monitor=lively_monitor())

    async def ready(pilot) -> None:
        await show_dashboard(pilot)
        await pilot.press("s")
        await pilot.pause()

    assert snap_compare(app, terminal_size=SMALL, run_before=ready)


def test_the_doctor_matches_its_snapshot(snap_compare, make_app) -> None:
    app = make_app(monitor=lively_monitor())

    async def ready(pilot) -> None:
        screen = DoctorScreen(lambda: FINDINGS)
        app.session.go.show(screen)
        await wait_until(pilot, lambda: screen.done)
        await pilot.press("down", "down", "down")
        await pilot.pause()

    assert snap_compare(app, terminal_size=SMALL, run_before=ready)

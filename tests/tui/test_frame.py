"""Tests that panels always have a title and, depending on the window size, a frame, a ruled line or neither."""

from __future__ import annotations

import re

import pytest
from support.tui import record_job, record_metrics, title_of, wait_until

from sae_tui.panels.log import LogPanel
from sae_tui.widgets.frame import HeadingLine, frame_of
from sae_tui.widgets.log_view import HINT, LogView
from trainer.contract.store.states import JobState

SIZES = {"framed": (120, 40), "ruled": (80, 24), "bare": (80, 16)}


@pytest.fixture
def job_id(data) -> int:
    """Record a job with curves, two ranks and a log."""
    recorded = record_job(data, "a [b]name[/]", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, recorded)
    data.run(recorded).log(0).write_text(f"{'long ' * 50}\n")
    return recorded


def rows(app) -> list[str]:
    """Return the rows that the terminal shows."""
    return ["".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips()]


@pytest.mark.parametrize(
    ("size", "frame"),
    [((100, 30), "framed"), ((99, 30), "ruled"), ((100, 29), "ruled"), ((80, 18), "ruled"), ((80, 17), "bare")],
)
def test_the_window_size_determines_the_kind_of_frame(size, frame) -> None:
    assert frame_of(*size) == frame


@pytest.mark.parametrize("frame", SIZES)
async def test_each_job_panel_has_its_title_with_and_without_a_frame(make_app, job_id, frame) -> None:
    app = make_app(2)
    async with app.run_test(size=SIZES[frame]) as pilot:
        await shown(pilot, job_id)
        text = "\n".join(rows(app))
        for title in (
            "Job 1 · a [b]name[/]",
            "held-out FVU 0.1754 · batch 0.125",
            "dead 3.3%",
            "Ranks",
            "Events",
            "Log of rank 0",
            HINT,
        ):
            assert title in text, title
        assert ("╭" in text, "─ Events ─" in text) == (frame == "framed", frame != "bare")


async def test_titles_are_kept_when_the_window_is_resized_and_restored(make_app, job_id) -> None:
    app = make_app(2)
    async with app.run_test(size=SIZES["framed"]) as pilot:
        await shown(pilot, job_id)
        before = rows(app)
        for frame in ("bare", "ruled", "bare", "framed"):
            await pilot.resize_terminal(*SIZES[frame])
            await pilot.pause()
            text = "\n".join(rows(app))
            assert [text.count(title) for title in ("Log of rank 0", "Events", "Job 1")] == [1, 1, 1], frame
        assert rows(app) == before


@pytest.mark.parametrize("frame", SIZES)
async def test_the_log_shows_its_title_once_at_each_size(make_app, job_id, frame) -> None:
    app = make_app(2)
    async with app.run_test(size=SIZES[frame]) as pilot:
        await shown(pilot, job_id)
        await pilot.press("l")
        await wait_until(pilot, lambda: "long" in app.screen.query_one(LogView).plain)
        await pilot.pause()
        assert app.screen.query_one(HeadingLine).display == (frame == "bare")
        text = "\n".join(rows(app))
        assert text.count("Job 1 · log of rank 0 · running · a [b]name[/]") == text.count(HINT) == 1


async def test_the_title_of_the_focused_panel_has_the_accent_colour(make_app, job_id) -> None:
    app = make_app(2)
    async with app.run_test(size=SIZES["framed"]) as pilot:
        await shown(pilot, job_id)
        log, settings = app.screen.query_one(LogPanel), app.screen.query_one("#settings")
        assert title_of(log) == "Log of rank 0"
        assert log.has_focus
        assert log.styles.border_title_color != settings.styles.border_title_color


async def test_moving_the_focus_inside_a_form_restyles_no_other_fields(make_app, monkeypatch) -> None:
    app = make_app(2)
    async with app.run_test(size=SIZES["framed"]) as pilot:
        await pilot.press("n", "tab")
        await pilot.pause()
        assert app.screen.query_one("#settings-panel").has_class("-focus-within")
        sizes, update_nodes = [], app.stylesheet.update_nodes

        def update(nodes, animate=False):
            sizes.append(len(nodes := list(nodes)))
            update_nodes(nodes, animate)

        monkeypatch.setattr(app.stylesheet, "update_nodes", update)
        await pilot.press("down")
        await pilot.pause()
        # A row has four widgets, whereas the form has over a hundred.
        assert 0 < max(sizes) < 10


@pytest.mark.parametrize("frame", SIZES)
async def test_a_long_name_leaves_space_for_state_and_devices_in_the_title(make_app, data, frame) -> None:
    long = record_job(data, "n" * 80, JobState.RUNNING, world_size=2)
    data.run(long).create()
    data.run(long).log(0).write_text("a line\n")
    app = make_app(2)
    async with app.run_test(size=SIZES[frame]) as pilot:
        await shown(pilot, long)
        assert re.search(r"n…?  ▶ running  cpu:2, \w+ ", rows(app)[0])


async def shown(pilot, job_id: int) -> None:
    app = pilot.app
    app.session.go.open_job(job_id)
    await wait_until(pilot, lambda: app.session.detail is not None and app.session.detail.log)
    await pilot.pause()

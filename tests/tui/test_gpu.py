"""Tests for a GPU's screen and for the keys and clicks that open it."""

from __future__ import annotations

import re
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest
from support.tui import StillMonitor, record_job, title_of, wait_until

from sae_tui.format import clock_time
from sae_tui.gpu.history import ROLL_UP
from sae_tui.gpu.simulated import Simulated, uuid_of
from sae_tui.gpu.window import SPANS_S
from sae_tui.panels.aggregate import AggregatePanel
from sae_tui.panels.gpu_page import GpuDetailsView, GpuHistory
from sae_tui.panels.gpus import GpuPanel
from sae_tui.panels.processes import ProcessTable
from sae_tui.screens import dashboard
from sae_tui.screens.gpu import GpuScreen
from trainer.contract.store.database import open_writer
from trainer.contract.store.states import JobState


def text(app, panel) -> str:
    return app.screen.query_one(panel).plain


async def shown(pilot, index: int) -> None:
    app = pilot.app
    await wait_until(pilot, lambda: isinstance(app.screen, GpuScreen) and app.screen.index == index)
    await wait_until(pilot, lambda: app.screen.query(GpuDetailsView) and "PCIe" in text(app, GpuDetailsView))


async def test_a_digit_opens_a_gpu_and_brackets_move_to_the_next(make_app, data) -> None:
    record_job(data, "minilm", JobState.RUNNING, gpu_ids=(0,), gpu_uuids=(uuid_of(0),))
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("3")
        await shown(pilot, 3)
        assert "used by mallory (pid 31415," in text(app, GpuDetailsView)
        assert "slowed by" in text(app, GpuDetailsView)
        await wait_until(pilot, lambda: "31415 mallory" in text(app, ProcessTable))
        assert [word in text(app, GpuHistory) for word in ("Utilisation", "of 24.0 GiB", "of 350 W", "Temp")] == [
            True
        ] * 4
        await pilot.press("right_square_bracket")
        await shown(pilot, 0)
        assert "job 1 (minilm)" in text(app, GpuDetailsView)
        await pilot.press("left_square_bracket", "left_square_bracket")
        await shown(pilot, 2)
        assert app.session.monitor.looked_at == 2
        assert "No visible process: idle." in text(app, ProcessTable)
        await pilot.press("escape")
        assert app.screen is app.router.dashboard
        await wait_until(pilot, lambda: app.session.monitor.looked_at is None)


async def test_a_gpu_is_read_again_if_the_previous_screen_closes_late(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("0", "escape", "1")
        await shown(pilot, 1)
        app.session.monitor.look_at(None)  # as the previous screen does when it is removed
        app.redraw.show_gpus()
        assert app.session.monitor.looked_at == 1


async def test_enter_on_a_gpu_opens_it(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        app.screen.query_one(GpuPanel).focus()
        await pilot.press("down", "down", "up", "enter")
        await shown(pilot, 1)
        await pilot.press("escape", "V", "down", "right", "down", "down", "enter")
        await shown(pilot, 3)


async def test_a_click_selects_a_gpu_and_a_second_click_opens_it(make_app) -> None:
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.click(GpuPanel, offset=(5, 6))
        assert app.screen is app.router.dashboard
        await pilot.click(GpuPanel, offset=(5, 5))
        await shown(pilot, 2)


async def test_the_cursor_reaches_gpus_below_the_visible_ones(make_app) -> None:
    app = make_app(16)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        app.screen.query_one(GpuPanel).focus()
        await pilot.press(*["down"] * 15)
        assert any(line.startswith("15 ") for line in text(app, GpuPanel).splitlines())
        await pilot.press(*["up"] * 15)
        assert text(app, GpuPanel).startswith(" 0")


@pytest.mark.parametrize("size", [(20, 6), (40, 12), (80, 24), (120, 40), (200, 60)])
async def test_a_lost_gpu_shows_its_reason_at_any_size(make_app, size) -> None:
    monitor = StillMonitor(source=Simulated(2, clock=lambda: 0.0, faults={1: "lost"}))
    monitor._latest = (monitor.latest()[0], replace(monitor.latest()[1], unread_since=monitor.now))
    app = make_app(monitor=monitor)
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        await pilot.press("1")
        await wait_until(pilot, lambda: isinstance(app.screen, GpuScreen))
        await pilot.pause()
        await wait_until(pilot, lambda: "fallen off the bus" in " ".join(text(app, ProcessTable).split()))
        if size[1] >= 24:
            assert f"✗ since {clock_time(monitor.now)}: the GPU has" in " ".join(text(app, GpuDetailsView).split())
        for panel in (GpuHistory, GpuDetailsView, ProcessTable):
            widget = app.screen.query_one(panel)
            for y in range(widget.size.height):
                assert widget.render_line(y).cell_length == widget.size.width


async def test_a_digit_without_a_gpu_has_no_effect(make_app) -> None:
    app = make_app(2)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await pilot.press("7")
        assert app.screen is app.router.dashboard


async def test_longer_spans_come_from_the_store_and_a_cursor_shows_time_and_job(make_app, data) -> None:
    begin = time.time() - 1800
    store_samples(data, uuid_of(0), [begin + 10 * step for step in range(100)], job=12)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press("0")
        await shown(pilot, 0)
        await pilot.press(*["greater_than_sign"] * 3)
        await wait_until(pilot, lambda: "last 1 h" in text(app, GpuHistory) and "▄" in text(app, GpuHistory))
        await pilot.press(*["left"] * 30)
        last = text(app, GpuHistory).splitlines()[-1]
        # A time before the last midnight is shown with its date.
        assert re.match(r" +(\d\d:\d\d:\d\d|\d\d \w+ \d\d:\d\d) · job 12 ", last), last
        assert "Utilisation 50%" in text(app, GpuHistory)
        assert "│" in text(app, GpuHistory).splitlines()[1][10:]
        await pilot.press(*["right"] * 31)
        assert "last 1 h" in text(app, GpuHistory)
        await pilot.press("less_than_sign")
        await wait_until(pilot, lambda: "last 15 min" in text(app, GpuHistory))
        await pilot.press(*["greater_than_sign"] * 9)
        await wait_until(pilot, lambda: "last 7 d" in text(app, GpuHistory))


async def test_the_dashboard_shows_longer_spans_for_all_gpus_in_full(make_app, data) -> None:
    begin = time.time() - 3000
    store_samples(data, uuid_of(0), [begin + 10 * step for step in range(50)], job=12)
    app = make_app(1)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        newest = text(app, AggregatePanel)
        await pilot.press(">", ">", ">")
        await wait_until(pilot, lambda: title_of(app.screen.query_one(GpuPanel)).strip() == "GPUs · last 1 h 00")
        # The GPU was in use only for a few minutes at the start of the hour.
        await wait_until(pilot, lambda: re.search("[^█]███+───", text(app, GpuPanel)))
        assert text(app, AggregatePanel) != newest
        await pilot.press("<", "<", "<")
        assert title_of(app.screen.query_one(GpuPanel)).strip() == "GPUs"
        assert title_of(app.screen.query_one(AggregatePanel)).strip() == "All GPUs · last 51 s"
        await wait_until(pilot, lambda: "███" not in text(app, GpuPanel))


async def test_a_span_read_late_does_not_replace_the_span_on_screen(make_app, data, monkeypatch) -> None:
    store_samples(data, uuid_of(0), [time.time() - 100], job=12)
    go_on, real = threading.Event(), dashboard.stored_past

    def read(path, host, samples, span_s, n, now):
        if span_s == SPANS_S[0]:
            go_on.wait(20)
        return real(path, host, samples, span_s, n, now)

    monkeypatch.setattr(dashboard, "stored_past", read)
    app = make_app(1)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press(">", ">")
        await wait_until(pilot, lambda: title_of(app.screen.query_one(GpuPanel)).strip() == "GPUs · last 15 min")
        go_on.set()
        await wait_until(pilot, lambda: len(app.screen._back._found) == 2)
        app.redraw.show_gpus()
        assert title_of(app.screen.query_one(GpuPanel)).strip() == "GPUs · last 15 min"


def store_samples(data, uuid: str, stamps: list[float], job: int) -> None:
    with closing(open_writer(data.gpu_db, "gpu")) as db:
        rows = [("gpu-box", 0, stamp, uuid, 50, 1 << 30, 24 << 30, 60, 100.0, job) for stamp in stamps]
        db.executemany("INSERT INTO gpu_metrics VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, NULL)", rows)
        db.execute(ROLL_UP, ("gpu-box", 0, 0.0, uuid))

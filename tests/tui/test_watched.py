"""Tests for the screen that shows the snapshots of watched latents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.tui import record_job, record_metrics, wait_until
from support.watched import put_watched, snapshot
from textual.pilot import Pilot
from textual.widgets import Label

from sae_tui.app import SaeApp
from sae_tui.panels.latents import LatentDetail
from sae_tui.screens import watched
from sae_tui.screens.watched import WatchedScreen
from sae_tui.widgets.table import KeyedTable
from trainer.contract.paths import DataDir
from trainer.contract.runs.watched import WATCHED
from trainer.contract.store.states import JobState

MakeApp = Callable[..., SaeApp]


@pytest.fixture
def job_id(data: DataDir) -> int:
    job_id = record_job(data, "a", JobState.FINISHED)
    record_metrics(data, job_id)
    put_watched(data.run(job_id).root, snapshot(100), snapshot(200), snapshot(300, latents=(12, 80)))
    return job_id


async def opened(pilot: Pilot[Any], app: SaeApp) -> WatchedScreen:
    await wait_until(pilot, lambda: app.session.jobs)
    app.session.go.open_job(app.session.jobs[0].id)
    await wait_until(pilot, lambda: app.screen.name == "job" and app.session.detail is not None)
    await pilot.press("W")
    await wait_until(pilot, lambda: isinstance(app.screen, WatchedScreen) and app.screen.snapshot)
    screen = app.screen
    assert isinstance(screen, WatchedScreen)
    await pilot.pause()
    return screen


def title(screen: WatchedScreen) -> str:
    return str(screen.query_one("#watched-title", Label).content).strip()


def texts(screen: WatchedScreen) -> str:
    return " ".join(screen.query_one(LatentDetail).plain.split())


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_the_newest_snapshot_is_shown_and_keys_step_through_them(
    make_app: MakeApp, job_id: int, size: tuple[int, int]
) -> None:
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app)
        assert title(screen) == "Job 1 · Watched latents · step 300 (snapshot 3 of 3)"
        assert [row.key for row in screen.query_one(KeyedTable).rows] == ["12", "80"]
        assert "named in train.watch_latents" in texts(screen)
        assert "the w12s300 ran" in texts(screen)
        assert "0.875" in texts(screen)
        assert "6.250% of 512" in texts(screen)
        await pilot.press("left")
        assert "step 200 (snapshot 2 of 3)" in title(screen)
        await pilot.press("down")
        await wait_until(pilot, lambda: "w77s200" in texts(screen))
        await pilot.press("left_square_bracket", "left")
        # The cursor stays on the latent.
        assert "step 100 (snapshot 1 of 3)" in title(screen)
        assert "w77s100" in texts(screen)
        assert "last snapshot: unknown" in texts(screen)
        await pilot.press("right_square_bracket", "right", "right")
        assert "step 300 (snapshot 3 of 3)" in title(screen)


async def test_snapshots_are_played_back_up_to_the_newest(make_app: MakeApp, job_id: int, monkeypatch) -> None:
    monkeypatch.setattr(watched, "_TICK_S", 0.05)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        shown: list[str] = []
        monkeypatch.setattr(screen, "_show_latent", lambda: shown.append(title(screen)))
        await pilot.press("space")
        await wait_until(pilot, lambda: len({one.split("step ")[1][:3] for one in shown}) == 3)
        steps = list(dict.fromkeys(one.split("step ")[1][:3] for one in shown))
        assert steps == ["100", "200", "300"]
        await wait_until(pilot, lambda: not screen._plays)


async def test_new_snapshots_of_a_running_job_appear(
    make_app: MakeApp, data: DataDir, job_id: int, monkeypatch
) -> None:
    monkeypatch.setattr(watched, "_TICK_S", 0.05)
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        put_watched(data.run(job_id).root, snapshot(400))
        await wait_until(pilot, lambda: "step 400 (snapshot 4 of 4)" in title(screen))
        # An earlier snapshot stays on the screen.
        await pilot.press("left")
        put_watched(data.run(job_id).root, snapshot(500))
        await wait_until(pilot, lambda: "step 300 (snapshot 3 of 5)" in title(screen))


async def test_each_sae_of_a_sweep_has_its_own_snapshots(make_app: MakeApp, data: DataDir) -> None:
    job_id = record_job(data, "a", JobState.RUNNING)
    put_watched(data.run(job_id).root, snapshot(100, "k=2"), snapshot(100, "k=4", (9,)))
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        screen = await opened(pilot, app)
        assert title(screen).startswith("Job 1 · k=2 · Watched latents")
        await pilot.press("m")
        await wait_until(pilot, lambda: title(screen).startswith("Job 1 · k=4 · Watched latents"))
        assert [row.key for row in screen.query_one(KeyedTable).rows] == ["9"]


async def test_a_job_without_snapshots_says_which_setting_stores_them(make_app: MakeApp, data: DataDir) -> None:
    record_metrics(data, record_job(data, "a", JobState.FINISHED))
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        app.session.go.open_job(app.session.jobs[0].id)
        await wait_until(pilot, lambda: app.screen.name == "job" and app.session.detail is not None)
        await pilot.press("W")
        await wait_until(pilot, lambda: list(app._notifications))
        assert "train.watch_latents" in next(iter(app._notifications)).message


async def test_a_damaged_file_shows_its_whole_lines(make_app: MakeApp, data: DataDir, job_id: int) -> None:
    file = data.run(job_id).root / WATCHED
    file.write_bytes(b"\xff\x00{}\n" + file.read_bytes()[:-40])
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        assert "step 200 (snapshot 2 of 2)" in title(screen)

"""Tests that `escape` returns to the screen and the focus where a screen was opened."""

from __future__ import annotations

import pytest
from support.features import features_file
from support.report_cards import put_card
from support.tui import record_job, record_metrics, wait_until

from sae_tui.screens.job import JobScreen
from sae_tui.screens.metrics import MetricsScreen
from trainer.contract.runs.features import FEATURES
from trainer.contract.store.states import JobState

# The keys that open screens, one above the other, from the jobs list. A space marks the job before it is compared.
WAYS = [
    "f comma",  # features, settings
    "l d",  # log, doctor
    "space+space+c d",  # comparison, doctor
    "0 d",  # one GPU, doctor
    "t d",  # processes, doctor
    "enter v f d",  # job, report card, features, doctor
    "enter b",  # curve
    "enter a",  # all metrics
    "enter y f8",  # launch form; the form for another kind of job replaces it
]


@pytest.fixture
def two_jobs(data) -> list[int]:
    """Record two finished jobs with report cards and features."""
    jobs = []
    for name in ("old", "new"):
        job_id = record_job(data, name, JobState.FINISHED, step=200, total_steps=200, output_path="saes/1")
        record_metrics(data, job_id)
        put_card(data.sae(job_id))
        (data.sae(job_id) / "cfg.json").write_text("{}")
        (data.sae(job_id) / FEATURES).write_bytes(features_file())
        jobs.append(job_id)
    return jobs


async def test_escape_returns_to_the_screen_and_the_focus_where_each_screen_was_opened(make_app, two_jobs) -> None:
    app = make_app(4)
    app.router._run_checks = lambda: ()  # importing torch takes seconds
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        for way in WAYS:
            origins = []
            for step in way.split():
                await pilot.pause()
                if step != "f8":
                    origins.append((app.screen, app.focused))
                before = app.screen
                await pilot.press(*step.split("+"))
                await wait_until(pilot, lambda before=before: app.screen is not before)
            for origin in reversed(origins):
                await pilot.press("escape")
                assert (app.screen, app.focused) == origin, way
            assert app.screen is app.router.dashboard


async def test_escape_from_a_job_opened_above_another_job_follows_the_first_again(make_app, two_jobs) -> None:
    app, (first, second) = make_app(4), two_jobs
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        for job_id in (first, second, second):  # the second time, nothing is opened
            app.router.open_job(job_id)
            await wait_until(pilot, lambda job_id=job_id: app.session.detail and app.session.detail.view.id == job_id)
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.session.detail.view.id == first)
        assert isinstance(app.screen, JobScreen)
        assert app.screen.job_id == first
        await pilot.press("a")
        await wait_until(pilot, lambda: isinstance(app.screen, MetricsScreen))
        app.router.open_job(second)
        await wait_until(pilot, lambda: app.session.detail.view.id == second)
        await pilot.press("escape")
        assert isinstance(app.screen, MetricsScreen)
        await wait_until(pilot, lambda: app.session.detail.view.id == first)
        await pilot.press("escape", "escape")
        assert app.screen is app.router.dashboard


async def test_a_dashboard_without_a_preview_reads_no_job_after_escape(make_app, two_jobs) -> None:
    app = make_app(8)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        app.router.open_job(two_jobs[0])
        await wait_until(pilot, lambda: app.session.watcher._followed is not None)
        await pilot.press("escape")
        await wait_until(pilot, lambda: app.session.watcher._followed is None)

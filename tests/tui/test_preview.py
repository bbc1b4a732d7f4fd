"""Tests for the preview of the job under the cursor."""

from __future__ import annotations

from contextlib import closing

import pytest
from support.tui import NOW, record_job, record_metrics, wait_until

from sae_tui.panels.curves import CurvePlot
from sae_tui.panels.headline import Headline
from sae_tui.panels.job_columns import SHOWN, columns_of
from sae_tui.panels.jobs import JobsPanel
from sae_tui.panels.preview import PreviewPanel, PreviewText
from sae_tui.screens.dashboard_rows import SIDE_BY_SIDE_FROM
from trainer.contract.runs.checkpoint_manifest import Best
from trainer.contract.runs.how_far import OVERFITTING, RESUMED, HowFar
from trainer.contract.settings.job_file import dump_job, parse_any
from trainer.contract.store.metrics_store import Heartbeat, SeriesWriter
from trainer.contract.store.rows import Event
from trainer.contract.store.states import JobState


def text(app) -> str:
    return app.screen.query_one(PreviewText).plain


def curve(app) -> str:
    return next(plot.plain for plot in app.screen.query(PreviewPanel).first().query(CurvePlot) if plot.display)


async def titled(pilot, words: str) -> None:
    panel = pilot.app.screen.query_one(PreviewPanel)
    await wait_until(pilot, lambda: words in str(panel._border_title or ""))


async def test_the_preview_follows_the_cursor_once_it_rests_on_a_job(make_app, data) -> None:
    wide = record_job(data, "wide", JobState.FINISHED, total_steps=400)
    record_metrics(data, wide, steps=200)
    record_job(data, "[red]odd[/] name", JobState.FAILED, error="rank 1 was killed (SIGKILL)")
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await titled(pilot, "Job 2 · [red]odd[/] name")
        assert "rank 1 was killed (SIGKILL)" in text(app)
        await pilot.press("down")
        await titled(pilot, "Job 1 · wide")
        await wait_until(pilot, lambda: "FVU" in curve(app) and "┤" in curve(app))
        assert "architecture" in text(app)
        assert "topk" in text(app)
        assert app.session.detail.log[-1] in text(app)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen.name == "job" and app.session.detail is not None)
        await pilot.press("escape", "up")
        await titled(pilot, "Job 2")


@pytest.mark.parametrize("size", [(200, 60), (SIDE_BY_SIDE_FROM, 60)])
async def test_a_wide_window_shows_the_preview_and_all_default_columns_of_the_jobs(make_app, data, size) -> None:
    record_metrics(data, record_job(data, "wide", JobState.FINISHED, total_steps=400), steps=200)
    app = make_app(8)
    async with app.run_test(size=size) as pilot:
        await titled(pilot, "Job 1 · wide")
        jobs = app.screen.query_one(JobsPanel)
        assert jobs.plain.splitlines()[0].split() == [column.title for column in columns_of(SHOWN)]
        beside = app.screen.query_one(PreviewPanel).region.y == app.screen.query_one("#finder").region.y
        assert beside == (size[0] >= SIDE_BY_SIDE_FROM)


async def test_the_previews_title_fits_its_frame_after_the_window_gets_smaller(make_app, data) -> None:
    record_metrics(data, record_job(data, "wide", JobState.RUNNING, total_steps=400), steps=200)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await titled(pilot, "Job 1 · wide")
        await pilot.resize_terminal(80, 24)
        await wait_until(pilot, lambda: str(app.screen.query_one(PreviewPanel)._border_title) == " Job 1 · wide ")


def report(data, job_id: int, kind: str, message: str) -> None:
    """Write a run event as rank 0 does."""
    with closing(SeriesWriter(data.run(job_id).metrics_db)) as writer:
        heartbeat = Heartbeat("training", 400, 400, 400 * 8192, NOW)
        writer.write([], heartbeat, [Event(timestamp=NOW, level="warning", kind=kind, message=message)])


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_preview_and_job_screen_report_overfitting_until_the_run_is_resumed(make_app, data, size) -> None:
    job_id = record_job(data, "few rows", JobState.RUNNING, total_steps=400)
    record_metrics(data, job_id)
    for number in range(4 if size == (80, 24) else 0):
        record_job(data, f"older {number}", JobState.FINISHED)
    how_far = HowFar(step=400, total_steps=400, passes=18.2, fvu=0.08, heldout_fvu=0.141, best=Best(300, 0.134))
    report(data, job_id, OVERFITTING, how_far.overfitting)
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        await titled(pilot, "Job 1 · few rows")
        await wait_until(pilot, lambda: "overfits" in text(app))
        few, many = "overfits: FVU 0.1254 in training, 0.1754 held out ", f"overfits: {how_far.overfitting} "
        assert (few if size == (80, 24) else many) in " ".join(text(app).split())
        assert "architecture" in text(app)
        await pilot.press("enter")
        await wait_until(pilot, lambda: app.screen.name == "job" and app.session.detail is not None)
        head = app.screen.query_one(Headline)
        await wait_until(pilot, lambda: "best at step 300 (0.1340" in " ".join(head.plain.split()))
        report(data, job_id, RESUMED, "resumed at step 400")
        await wait_until(pilot, lambda: "overfits" not in head.plain)


async def test_the_preview_for_an_extraction_shows_its_speed(make_app, data) -> None:
    job, problems = parse_any(
        {"kind": "extract", "model": {"path": "m.gguf", "hooks": ["resid_post.3"]}, "text": {"path": "t.txt"},
         "extract": {"n_tokens": 1000, "output": "acts"}}
    )  # fmt: skip
    assert job is not None, problems
    record_job(data, "acts", JobState.RUNNING, config=dump_job(job))
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await titled(pilot, "acts")
        assert "rows/s" in curve(app)
        assert "m.gguf" in text(app)


@pytest.mark.parametrize(("size", "shown"), [((80, 24), False), ((60, 14), False), ((120, 40), True)])
async def test_the_preview_is_shown_if_there_is_space(make_app, data, size, shown) -> None:
    record_job(data, "one", JobState.FINISHED)
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.pause()
        panel = app.screen.query_one(PreviewPanel)
        await wait_until(pilot, lambda: panel.display == shown)
        if shown:
            await titled(pilot, "Job 1 · one")
        else:
            assert app.session.detail is None


async def test_a_job_opened_at_once_keeps_the_log_that_its_screen_follows(make_app, data) -> None:
    record_job(data, "one", JobState.FINISHED)
    app = make_app(4)
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        app.screen._selected()
        app.session.go.open_job(1)
        await wait_until(pilot, lambda: app.session.watcher._followed == (1, 0))
        app.session.watcher.follow(1, 1)
        # Wait longer than the cursor must rest on a job before the preview shows the job.
        await pilot.pause(0.5)
        assert app.session.watcher._followed == (1, 1)

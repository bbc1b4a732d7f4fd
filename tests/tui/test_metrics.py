"""Tests for the screen that shows all of a job's metrics in a grid of plots."""

from __future__ import annotations

import re

import pytest
from support.tui import record_job, record_metrics, wait_until

from sae_tui.panels.metric_grid import MetricGrid, MetricPlot, metrics_of
from sae_tui.screens.job import JobScreen
from sae_tui.screens.metrics import MetricsScreen
from sae_tui.widgets.filter import FilterSummary
from trainer.contract.store.states import JobState


@pytest.fixture
def trained(data) -> int:
    job_id = record_job(data, "minilm", JobState.FINISHED)
    record_metrics(data, job_id)
    return job_id


def plots(app) -> list[MetricPlot]:
    return [plot for plot in app.screen.query(MetricPlot) if plot.display]


def titles(app) -> list[str]:
    return [plot.plot_title for plot in plots(app)]


def shown(app) -> str:
    """Return the text on the screen."""
    screen = app.screen
    return "\n".join(strip.text.rstrip() for strip in screen._compositor.render_strips())


def said(app) -> str:
    return app.screen.query_one(FilterSummary).text


async def opened(pilot) -> None:
    app = pilot.app
    await wait_until(pilot, lambda: app.session.jobs)
    await pilot.press("enter")
    await wait_until(pilot, lambda: isinstance(app.screen, JobScreen) and app.session.detail)
    await pilot.press("a")
    await wait_until(pilot, lambda: isinstance(app.screen, MetricsScreen) and plots(app) and plots(app)[0].plain)


async def test_metrics_fill_as_many_pages_as_needed_starting_with_the_held_out_fvu(make_app, trained) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        found = {metric.title for metric in metrics_of(app.session.detail, "")}
        assert titles(app)[:2] == ["held-out FVU", "batch FVU"]
        assert len(plots(app)) == 12
        seen = set(titles(app))
        while not said(app).startswith(f"{len(seen) - len(titles(app)) + 1} to {len(found)} of"):
            await pilot.press("pagedown")
            seen |= set(titles(app))
        assert seen == found


async def test_a_regular_expression_filters_and_an_incomplete_one_hides_nothing(make_app, trained) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        await pilot.press(
            "slash",
            *"(held-out|batch) F(vu",
        )
        await wait_until(pilot, lambda: "not a regular expression yet" in said(app))
        assert len(plots(app)) == 12
        await pilot.press(")", "$", "enter")
        await wait_until(pilot, lambda: titles(app) == ["held-out FVU", "batch FVU"])
        await pilot.press("enter")
        await wait_until(pilot, lambda: titles(app) == ["held-out FVU"])
        await pilot.press("tab")
        await wait_until(pilot, lambda: titles(app) == ["batch FVU"])
        await pilot.press("escape")
        await wait_until(pilot, lambda: titles(app) == ["held-out FVU", "batch FVU"])
        await pilot.press("escape")
        assert isinstance(app.screen, JobScreen)


async def test_a_cursor_shows_the_same_step_in_all_plots_and_plus_zooms_in(make_app, trained) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        n_steps = app.session.detail.series["loss", 0][-1].step
        newest = plots(app)[0].plain.splitlines()[0]
        await pilot.press("left", "left", "left")
        await wait_until(pilot, lambda: " at " in plots(app)[0].plain.splitlines()[0])
        assert {plot.plain.splitlines()[0].rpartition(" at ")[2] for plot in plots(app)[:2]} != {""}
        assert any("│" in line for line in plots(app)[0].plain.splitlines())
        await pilot.press("plus", "plus")
        await wait_until(pilot, lambda: "steps" in said(app))
        first, last = map(int, re.findall(r"steps (\d+) to (\d+)", said(app))[0])
        assert 0 < last - first <= n_steps / 3
        await pilot.press("minus", "minus")
        await wait_until(pilot, lambda: "steps" not in said(app))
        await pilot.press("right", "right", "right")
        await wait_until(pilot, lambda: plots(app)[0].plain.splitlines()[0] == newest)


async def test_all_plots_have_the_same_steps_and_readable_names(make_app, trained) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        # Held-out values start at step 50, other values at step 10, and every axis at step 0.
        assert {tuple(plot.plain.splitlines()[-1].split()) for plot in plots(app)} == {("0", "100", "step")}
        assert not [title for title in titles(app) if "_" in title]


@pytest.mark.parametrize("size", [(20, 6), (40, 12), (80, 24), (200, 60)])
async def test_the_grid_fits_any_window_size(make_app, trained, size) -> None:
    app = make_app()
    async with app.run_test(size=size) as pilot:
        await opened(pilot)
        assert len(plots(app)) >= 1
        for plot in plots(app):
            for y in range(plot.size.height):
                assert plot.render_line(y).cell_length == plot.size.width


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (JobState.RUNNING, "No values yet."),
        (JobState.FAILED, "This job has no values."),
        (JobState.IMPORTED, "The SAE was imported, so it has no curves."),
    ],
)
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_job_without_values_says_so_at_the_left_edge(make_app, data, state, why, size) -> None:
    record_job(data, "minilm", state)
    app = make_app()
    async with app.run_test(size=size) as pilot:
        await wait_until(pilot, lambda: app.session.jobs)
        await pilot.press("enter")
        await wait_until(pilot, lambda: isinstance(app.screen, JobScreen) and app.session.detail)
        await pilot.press("a")
        await wait_until(pilot, lambda: isinstance(app.screen, MetricsScreen) and why in shown(app))
        assert any(line.startswith(f"  {why}") for line in shown(app).splitlines())
        assert said(app) == ""


async def test_metrics_arriving_while_the_screen_is_closing_are_not_drawn(make_app, trained) -> None:
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await opened(pilot)
        screen, grid = app.screen, app.screen.query_one(MetricGrid)
        leaving = grid.remove()
        grid.show_metrics(metrics_of(app.session.detail, "") * 2, None, None, None)
        await leaving
        assert app.screen is screen
        assert not screen.query(MetricPlot)

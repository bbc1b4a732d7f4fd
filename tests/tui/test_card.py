"""Tests for the screen showing a job's report card."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing

import pytest
from support.report_cards import put_card
from support.tui import record_job, record_metrics, wait_until
from textual.pilot import Pilot
from textual.widgets import Label

from sae_tui.app import SaeApp
from sae_tui.jobs.evaluation.outcome import DONE
from sae_tui.screens.card import CardPanel, CardScreen
from sae_tui.screens.features import FeaturesScreen
from sae_tui.widgets.footer import Footer
from trainer.contract.paths import DataDir
from trainer.contract.store.job_store import Control
from trainer.contract.store.states import JobState

MakeApp = Callable[..., SaeApp]
FACTS = (
    "FVU", "explained variance", "MSE", "cosine", "L0", "shrinkage", "latents", "density", "decoder cosine",
    "gamma of the data", "CE score", "KL score", "measured on", "probing (AUC)", "probed on",
)  # fmt: skip


@pytest.fixture
def job_id(data: DataDir) -> int:
    job_id = record_job(data, "a", JobState.FINISHED)
    record_metrics(data, job_id)
    return job_id


async def opened(pilot: Pilot[None], app: SaeApp) -> CardScreen:
    """Open the first job, then press the key that opens its report card."""
    await wait_until(pilot, lambda: app.session.jobs)
    app.session.go.open_job(app.session.jobs[0].id)
    await wait_until(pilot, lambda: app.screen.name == "job")
    await pilot.press("v")
    await wait_until(pilot, lambda: isinstance(app.screen, CardScreen) and app.screen.query_one(CardPanel).plain)
    screen = app.screen
    assert isinstance(screen, CardScreen)
    return screen


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_all_figures_on_a_report_card_fit_on_one_screen(
    make_app: MakeApp, data: DataDir, job_id: int, size: tuple[int, int]
) -> None:
    put_card(data.sae(job_id))
    app = make_app(4)
    async with app.run_test(size=size) as pilot:
        screen = await opened(pilot, app)
        panel = screen.query_one(CardPanel)
        shown = panel.plain.splitlines()[: panel.size.height]
        for fact in FACTS:
            assert any(line.startswith(f" {fact}") for line in shown), fact
        assert " FVU                 0.2500 ± 0.0100, median row 0.2400" in shown
        # The latents are listed below, with their most strongly activating tokens aligned in one column.
        latents = panel.plain.splitlines()[-20:]
        assert latents[2].startswith("      3   3.000%")
        assert {line.index(f" of{number}") for number, line in enumerate(latents, 1)} == {latents[0].index(" of1")}
        await pilot.press("f")
        assert isinstance(app.screen, FeaturesScreen)


async def test_the_report_card_for_each_sae_in_a_sweep_is_shown(make_app: MakeApp, data: DataDir, job_id: int) -> None:
    for label, fvu in (("k=16", 0.5), ("k=8", 0.75)):
        table = {"n_tokens": 9, "d_in": 2, "d_sae": 4, "fvu": fvu, "l0_quantiles": [1.0] * 5, "dead": 0.0,
                 "dense_1": 0.0, "dense_10": 0.0, "density_histogram": [1]}  # fmt: skip
        put_card(data.sae(job_id) / label, label=label, figures=table, spliced=None, probing=None, latents=[])
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        await wait_until(pilot, lambda: "0.5000" in screen.query_one(CardPanel).plain)
        assert "k=16" in str(screen.query_one("#card-title", Label).content)
        assert "SAE" in screen.query_one(Footer).plain
        await pilot.press("m")
        assert "0.7500" in screen.query_one(CardPanel).plain
        await pilot.press("escape")
        assert app.screen.name == "job"


async def test_a_job_without_a_report_card_explains_how_to_get_one_and_then_shows_it(
    make_app: MakeApp, data: DataDir, job_id: int
) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        screen = await opened(pilot, app)
        panel = screen.query_one(CardPanel)
        await wait_until(pilot, lambda: "has no report card yet" in panel.plain)
        put_card(data.sae(job_id))
        with closing(Control(data.control_db)) as control:
            control.add_event(job_id, DONE, "was evaluated")
        await wait_until(pilot, lambda: "0.2500 ± 0.0100" in panel.plain)

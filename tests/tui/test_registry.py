"""Tests that adding a panel to the job screen takes only one file and one registry entry."""

from __future__ import annotations

import pytest
from support.tui import record_job, record_metrics, wait_until

from sae_tui.panels.registry import PANELS, PanelEntry
from trainer.contract.store.states import JobState


@pytest.mark.parametrize("is_registered", [True, False])
async def test_a_registered_panel_is_shown_on_the_job_screen(make_app, data, monkeypatch, is_registered) -> None:
    if is_registered:
        monkeypatch.setitem(PANELS, "toy", PanelEntry("support.toy_panel:ToyPanel", "middle"))
    job_id = record_job(data, "minilm", JobState.RUNNING, world_size=2, total_steps=400)
    record_metrics(data, job_id)
    app = make_app(2)
    async with app.run_test(size=(120, 40)) as pilot:
        app.session.go.open_job(job_id)
        await wait_until(pilot, lambda: app.session.detail and app.session.detail.view.tokens)
        await pilot.pause()
        panels = list(app.screen.query("#toy"))
        assert len(panels) == is_registered
        assert all(panel.plain == f"{200 * 8192} tokens seen" and panel.region.area for panel in panels)
        assert ("tokens seen" in app.export_screenshot().replace("&#160;", " ")) == is_registered


@pytest.mark.parametrize("name", PANELS)
def test_every_panel_can_be_loaded(name) -> None:
    panel = PANELS[name].make(name)
    assert panel.id == name
    assert callable(panel.show_detail)

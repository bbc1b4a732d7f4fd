"""Opens the screens that use a language model, with the stub of `model_stub` in place of the trainer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import psutil
from support import model_stub
from support.features import features_file
from support.tui import record_job, wait_until
from textual.pilot import Pilot

from sae_tui.app import SaeApp
from sae_tui.panels.latents import LatentList
from sae_tui.screens.features import FeaturesScreen
from sae_tui.screens.model_screen import ModelScreen
from trainer.contract.paths import DataDir
from trainer.contract.runs.features import FEATURES
from trainer.contract.store.states import JobState


def record_sae(data: DataDir, label: str = "") -> int:
    """Record a finished job that has an SAE with features."""
    job_id = record_job(data, "a", JobState.FINISHED)
    (folder := data.sae(job_id) / label).mkdir(parents=True)
    (folder / FEATURES).write_bytes(features_file())
    return job_id


def use_stub(app: SaeApp, mode: str, signs: Path) -> None:
    app.session.model.command = (sys.executable, str(model_stub.__file__), mode, str(signs))


async def open_browser(pilot: Pilot[Any], app: SaeApp, mode: str, signs: Path) -> FeaturesScreen:
    """Open the features of the only job, with the cursor on latent 0."""
    use_stub(app, mode, signs)
    await wait_until(pilot, lambda: app.session.jobs)
    screen = FeaturesScreen(app.session, app.session.jobs[0].id)
    app.session.go.show(screen)
    await wait_until(pilot, lambda: screen.query(LatentList) and screen.query_one(LatentList).latent == 0)
    return screen


async def open_model(pilot: Pilot[Any], app: SaeApp, key: str, mode: str, signs: Path) -> Any:
    """Open a screen with a key in the browser."""
    await open_browser(pilot, app, mode, signs)
    await pilot.press(key)
    await wait_until(pilot, lambda: isinstance(app.screen, ModelScreen) and app.screen.is_mounted)
    return app.screen


def requests(signs: Path) -> list[dict[str, Any]]:
    """Return the requests that the stub has received."""
    file = signs / "requests"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def stubs() -> list[psutil.Process]:
    """Return the running stubs that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if str(model_stub.__file__) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found

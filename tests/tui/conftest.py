"""The app over simulated GPUs whose clock the test turns, and a store in a temporary folder."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.tui import StillMonitor
from textual.widgets import Input

from sae_tui.app import SaeApp
from sae_tui.host import Host, HostLoad
from sae_tui.settings import Settings
from trainer.contract.paths import DataDir
from trainer.contract.planning import first_look


@pytest.fixture(autouse=True, scope="session")
def _lasting_objects() -> Iterator[None]:
    """Keep what was made before from being searched for cycles of garbage: pytest holds an object for every test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _rare_collections() -> Iterator[None]:
    """Look for garbage as rarely as the app does; Python's default takes a fifth of the time of these tests."""
    usual = gc.get_threshold()
    gc.set_threshold(20_000, 20, 20)
    yield
    gc.set_threshold(*usual)


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    data_dir = DataDir(tmp_path / "data")
    data_dir.create()
    return data_dir


class StillHost(Host):
    """A machine on which nothing moves."""

    def load(self) -> HostLoad:
        return HostLoad(37.0, 2.1, 8 << 30, 24 << 30, 0, 12e6, 3e6)


@pytest.fixture
def make_app(data: DataDir) -> Callable[..., SaeApp]:
    """Return `make_app(gpus=8, view="per_gpu")`, which makes an app in which nothing moves by itself."""

    def make(
        gpus: int = 4,
        *,
        monitor: StillMonitor | None = None,
        problems: tuple = (),
        readonly: bool = False,
        **settings: object,
    ) -> SaeApp:
        chosen = Settings(sampling_interval_s=60.0, **settings)
        app = SaeApp(data, monitor or StillMonitor(gpus), chosen, problems, readonly=readonly)
        app.session.host = StillHost()
        return app

    return make


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what differs between machines: no blinking cursor, one host name, one kind of CPU, colours on."""
    monkeypatch.setattr(first_look, "multiplies_bf16", lambda: False)
    monkeypatch.setattr(Input, "cursor_blink", False, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TZ", "UTC")

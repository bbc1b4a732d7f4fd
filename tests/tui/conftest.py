"""The app over simulated GPUs whose clock the test turns, and a store in a temporary folder."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.widgets import Input

from sae_tui.app import SaeApp
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.ring import Ring
from sae_tui.gpu.simulated import Simulated
from sae_tui.settings import Settings
from trainer.contract.paths import DataDir


class StillMonitor:
    """The face of `Monitor` over a source that is read when the test says so."""

    source_name = "simulated"
    cuda = False
    stuck = False
    problem = ""

    def __init__(self, gpus: int = 4, *, source: Simulated | None = None, samples: int = 60) -> None:
        self.now = 1_700_000_000.0
        self.source = source or Simulated(gpus, clock=lambda: self.now)
        self._rings = [Ring() for _ in range(self.source.open())]
        self._latest: tuple[GpuSample, ...] = ()
        for _ in range(samples):
            self.step()

    def step(self) -> None:
        """One more sample of every card, a second later."""
        self.now += 1
        self._latest = tuple(self.source.sample(index, processes=True) for index in range(len(self._rings)))
        for ring, sample in zip(self._rings, self._latest, strict=True):
            ring.append(sample)

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def latest(self) -> tuple[GpuSample, ...]:
        return self._latest

    def column(self, index: int, name: str, n: int) -> list[float | None]:
        return self._rings[index].column(name, n)


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    found = DataDir(tmp_path / "data")
    found.create()
    return found


@pytest.fixture
def make_app(data: DataDir) -> Callable[..., SaeApp]:
    """`make_app(gpus=8, view="per_gpu")`; nothing in it moves by itself."""

    def make(gpus: int = 4, *, monitor: StillMonitor | None = None, problems: tuple = (), **settings: object) -> SaeApp:
        chosen = Settings(sampling_interval_s=60.0, **settings)
        return SaeApp(data, monitor or StillMonitor(gpus), chosen, problems)

    return make


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No blinking cursor, one host name, colours on."""
    monkeypatch.setattr(Input, "cursor_blink", False, raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "gpu-box")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TZ", "UTC")


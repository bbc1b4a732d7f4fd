"""Fixtures for the app with simulated GPUs, a clock controlled by the test, and a store in a temporary folder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scenes import same_everywhere, still_app
from support.tui import StillMonitor
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet

from sae_tui.app import SaeApp
from sae_tui.hosts.hosts import Hosts
from trainer.contract.paths import DataDir


@pytest.fixture(autouse=True, scope="session")
def _lasting_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection, because pytest keeps objects alive for every test."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _parse_css_once() -> Iterator[None]:
    """Keep parsed CSS for later apps with the same theme. Parsing would take a tenth of the test time."""
    parsed: dict[tuple[object, ...], list[RuleSet]] = {}
    parse = Stylesheet._parse_rules

    def parse_once(sheet: Stylesheet, *arguments: Any, **options: Any) -> list[RuleSet]:
        key = (arguments, *options.items(), frozenset(sheet._variables.items()))
        if key not in parsed:
            parsed[key] = parse(sheet, *arguments, **options)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    data_dir = DataDir(tmp_path / "data")
    data_dir.create()
    return data_dir


@pytest.fixture
def make_app(data: DataDir) -> Callable[..., SaeApp]:
    """Return a function that creates an app, as in `make_app(gpus=8, theme="light")`; the app changes only when the
    test acts.
    """

    def make(
        gpus: int = 4,
        *,
        monitor: StillMonitor | None = None,
        problems: tuple = (),
        readonly: bool = False,
        hosts: Hosts | None = None,
        **settings: object,
    ) -> SaeApp:
        return still_app(data, monitor or StillMonitor(gpus), problems, readonly=readonly, hosts=hosts, **settings)

    return make


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make screens look the same on every machine."""
    same_everywhere(monkeypatch)

"""Fixtures for the app with simulated GPUs, a clock controlled by the test, and a store in a temporary folder."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.segment import Segment
from support.scenes import same_everywhere, still_app
from support.tui import StillMonitor
from textual.cache import FIFOCache
from textual.css.model import RuleSet
from textual.css.stylesheet import Stylesheet
from textual.strip import Strip

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
    theme: tuple[dict[str, str], frozenset[tuple[str, str]]] = {}, frozenset()

    def parse_once(sheet: Stylesheet, *arguments: Any, **options: Any) -> list[RuleSet]:
        nonlocal theme
        if theme[0] is not sheet._variables:
            theme = sheet._variables, frozenset(sheet._variables.items())
        key = (arguments, *options.items(), theme[1])
        if key not in parsed:
            parsed[key] = parse(sheet, *arguments, **options)
        return parsed[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parse_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _create_caches_late() -> Iterator[None]:
    """Create each of a strip's seven caches when it is first used. Most never are, and creating them would take 7 % of
    the test time.
    """
    whole = Strip([])
    caches = {name: getattr(whole, name) for name in Strip.__slots__}
    sizes = {name: cache._maxsize for name, cache in caches.items() if isinstance(cache, FIFOCache)}

    def start(strip: Strip, segments: Iterable[Segment], cell_length: int | None = None) -> None:
        strip._segments, strip._cell_length = list(segments), cell_length
        strip._render_cache = strip._link_ids = strip._cell_count = None

    def create(strip: Strip, name: str) -> FIFOCache[Any, Any]:
        if name not in sizes:
            raise AttributeError(name)
        cache: FIFOCache[Any, Any] = FIFOCache(sizes[name])
        setattr(strip, name, cache)
        return cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Strip, "__init__", start)
        patch.setattr(Strip, "__getattr__", create, raising=False)
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

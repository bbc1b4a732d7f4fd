"""Tests for GPUs shown as a map of tiles."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tui import StillMonitor, wait_until

from sae_tui.app import SaeApp
from sae_tui.format import clock_time
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.simulated import Simulated
from sae_tui.panels.gpu_map import TALLEST, map_grid, map_lines
from sae_tui.panels.gpu_row import GpuRow
from sae_tui.panels.gpus import GpuPanel
from sae_tui.screens.gpu import GpuScreen

MakeApp = Callable[..., SaeApp]
SAMPLE = Simulated(1, clock=lambda: 0.0).sample(0, processes=False)


def row(index: int, holder_style: str = "dim", **fields: object) -> GpuRow:
    sample: GpuSample = replace(SAMPLE, index=index, **({"utilization": 7.0} | fields))
    return GpuRow(sample, "job 12 (gemma)", holder_style, lambda name, n: [None] * n)


def text(rows: list[GpuRow], width: int, space: int) -> list[str]:
    lines = map_lines(rows, width, map_grid(len(rows), width, space))
    return ["".join(words for words, _ in line) for line in lines]


@given(st.integers(1, 300), st.integers(1, 250), st.integers(1, 60))
def test_tiles_use_the_available_width_and_height(count: int, width: int, space: int) -> None:
    grid = map_grid(count, width, space)
    assert grid.columns * grid.bands >= count > grid.columns * (grid.bands - 1)
    assert 1 <= grid.height <= TALLEST
    assert grid.count_fitting(space) * grid.height <= space
    lines = text([row(index) for index in range(min(count, 2 * grid.columns))], width, space)
    assert max(map(len, lines)) <= width


async def test_every_gpu_is_shown_or_counted_at_every_size(make_app: MakeApp) -> None:
    app = make_app(4)
    async with app.run_test(size=(80, 24)) as pilot:
        panel = app.screen.query_one(GpuPanel)
        for width in (12, 36, 80, 200):
            await pilot.resize_terminal(width, 60)
            await wait_until(pilot, lambda width=width: abs(panel.width - width) <= 2)  # type: ignore[misc]
            for count in (1, 9, 64, 257):
                rows = [row(index, holder_style="good") for index in range(count)]
                for space in (1, 2, 5, 16, 40):
                    panel.scroll_gpus(-100)
                    panel.show_gpus(rows, shape="map", space=space)
                    shown = {int(number) for number in re.findall(r"(\d+)▶", panel.plain)}
                    more = re.search(r"▼ (\d+)", panel.plain)
                    below = int(more[1]) if more else 0
                    assert len(shown) + below == count, (width, count, space)
                    assert len(panel.plain.splitlines()) <= max(2, space)


def test_a_tile_shows_the_state_of_its_gpu_even_without_colour() -> None:
    rows = [
        row(0, "good", utilization=98.0),
        row(1, "text", utilization=100.0, temperature_c=91.0),
        row(2, utilization=0.0),
        row(63, healthy=False, reason="the GPU has fallen off the bus"),
    ]
    assert text(rows, 40, 1) == ["  0▶  98%   1●▲100%   2    0%  63✗    – "]
    tall = text(rows, 80, 4)
    assert tall[1].split() == ["0.9/24.0Gi", "0.9/24.0Gi", "0.9/24.0Gi", "the", "GPU", "has", "fallen"]
    assert "91°C" in tall[2]
    assert tall[3].startswith("job 12 (gemma)")


def test_the_tile_of_a_lost_gpu_shows_when_it_was_lost() -> None:
    lost = row(63, healthy=False, reason="the GPU has fallen off the bus", unread_since=time.time())
    clock = clock_time(lost.sample.unread_since or 0)
    assert [line.strip() for line in text([lost], 10, 4)[1:]] == [f"{clock}:", "the GPU", "has…"]
    assert [line.strip() for line in text([lost], 10, 2)[1:]] == [f"{clock}:…"]


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_map_is_shown_if_lines_do_not_fit_and_its_cursor_opens_a_gpu(
    make_app: MakeApp, size: tuple[int, int]
) -> None:
    app = make_app(monitor=StillMonitor(64, samples=2))
    async with app.run_test(size=size) as pilot:
        panel = app.screen.query_one(GpuPanel)
        await wait_until(pilot, lambda: "63●" in panel.plain)
        assert "▼" not in panel.plain
        panel.focus()
        await pilot.press("down", "right", "right", "enter")
        await wait_until(pilot, lambda: isinstance(app.screen, GpuScreen))
        assert isinstance(app.screen, GpuScreen)
        assert app.screen.index == 10
        await pilot.press("escape", "V")
        await wait_until(pilot, lambda: "▼" in panel.plain)
        assert " 0 RTX 3090" in panel.plain

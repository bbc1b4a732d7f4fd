"""Tests for GPUs shown as lines, with a layout computed from the table of columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sae_tui.format import BLOCKS
from sae_tui.gpu.simulated import Simulated
from sae_tui.panels import gpu_lines as module
from sae_tui.panels.gpu_cards import card, card_grid, card_lines
from sae_tui.panels.gpu_lines import gpu_lines
from sae_tui.panels.gpu_row import GPU_COLUMNS, HOLDER, POWER, GpuColumn, GpuRow

SAMPLE = Simulated(1, clock=lambda: 0.0).sample(0, processes=True)
EXTRA = GpuColumn("FAN", 7, lambda _: ("fan 42%", "text"), drop=3)
COLUMNS = (*GPU_COLUMNS[:-1], EXTRA, HOLDER)
NARROWEST = 45


def lines(width: int, holder: str = "free", each: int = 1) -> list[str]:
    row = GpuRow(SAMPLE, holder, "dim", lambda name, n: [50.0] * n)
    return ["".join(text for text, _ in line) for line in gpu_lines([row], [row], width, each)]


@given(st.integers(NARROWEST, 250), st.text("abc ", max_size=60), st.sampled_from([1, 2]), st.booleans())
def test_lines_fill_the_width_whatever_columns_there_are(width: int, holder: str, each: int, extra: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "GPU_COLUMNS", COLUMNS if extra else GPU_COLUMNS)
        assert {cell_len(line) for line in lines(width, holder, each)} == {width - 1}


def test_a_new_column_appears_where_it_fits_and_takes_only_spare_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GPU_COLUMNS", COLUMNS)
    shown = {width: lines(width)[0] for width in range(NARROWEST, 250)}
    first = min(width for width in shown if "fan 42%" in shown[width])
    assert all(("fan 42%" in line) is (width >= first) for width, line in shown.items())
    assert 70 < first < 80
    for line in shown.values():
        assert "0.9/24.0Gi" in line
        assert "33°C" in line


@pytest.mark.parametrize("width", [40, 50, 60, 80, 120])
def test_every_width_shows_all_four_quantities(width: int) -> None:
    shown = lines(width)[0]
    assert [word for word in ("0%", "0.9/24.0Gi", "33°C", "24 W") if word not in shown] == []


def test_a_gpu_keeps_its_history_at_80_columns_whoever_holds_it() -> None:
    for holder in ("idle", "used by mallory (pid 31415, python train.py)", "x" * 60):
        assert lines(78, holder)[0].count(BLOCKS[4]) >= 12


def blocks(line: str) -> int:
    return sum(char in BLOCKS[1:] for char in line)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(("width", "space"), [(38, 40), (60, 16), (78, 12), (116, 12), (116, 30), (196, 24)])
def test_every_card_shows_all_quantities_in_full_and_cards_are_spread_evenly(
    count: int, width: int, space: int
) -> None:
    full = replace(SAMPLE, memory_used_bytes=int(21.9 * 2**30), utilization=100, power_w=350.0)
    rows = [GpuRow(full, "job 12 (a long name of a job)", "good", lambda name, n: [50.0] * n)] * count
    grid = card_grid(count, width, space)
    shown = ["".join(text for text, _ in line) for line in card_lines(rows, width, grid)]
    assert len(shown) == grid.bands * grid.height
    for word in ("100%", "21.9/24.0Gi", "33°C", "350 W"):
        assert sum(line.count(word) for line in shown) >= count, (word, shown)
    assert grid.columns * grid.bands - count < grid.bands


def test_four_cards_are_two_by_two_or_side_by_side_and_tall_cards_have_all_histories() -> None:
    assert [card_grid(4, width, 40).columns for width in (38, 78, 116, 150, 196)] == [1, 2, 2, 2, 4]
    rows = [GpuRow(SAMPLE, "idle", "dim", lambda name, n: [50.0] * n)]
    assert sum(blocks(text) > 0 for line in card(rows[0], 50, 6) for text, _ in line) == 4


def test_the_drop_order_decides_which_column_a_narrow_terminal_drops_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = lines(65)[0]
    assert "24 W" in wide
    assert "free" not in wide
    assert "24 W" not in lines(39)[0]
    important = replace(POWER, drop=0)
    monkeypatch.setattr(module, "GPU_COLUMNS", tuple(important if one is POWER else one for one in GPU_COLUMNS))
    assert "24 W" in lines(39)[0]

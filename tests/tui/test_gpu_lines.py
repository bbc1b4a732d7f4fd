"""Tests for GPUs shown as lines, with a layout computed from the table of columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from sae_tui.gpu.simulated import Simulated
from sae_tui.panels import gpu_lines as module
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


def test_the_drop_order_decides_which_column_a_narrow_terminal_drops_first(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = lines(65)[0]
    assert "24 W" in wide
    assert "free" not in wide
    assert "24 W" not in lines(59)[0]
    important = replace(POWER, drop=0)
    monkeypatch.setattr(module, "GPU_COLUMNS", tuple(important if one is POWER else one for one in GPU_COLUMNS))
    assert "24 W" in lines(59)[0]

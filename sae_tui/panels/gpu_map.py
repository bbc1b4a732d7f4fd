"""GPUs as a map of tiles, for more GPUs than fit as lines: each tile shows a GPU's index, utilisation and state."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from sae_tui.format import UNKNOWN, fit, percent
from sae_tui.gpu.base import GpuSample
from sae_tui.panels.gpu_cards import CardGrid
from sae_tui.panels.gpu_row import (
    MEMORY,
    OTHERS,
    POWER,
    TEMPERATURE,
    UTILIZATION,
    GpuColumn,
    GpuRow,
    blank,
    fitting,
    memory_share,
)
from sae_tui.widgets.lines import Line, Span

LEGEND = "▶ job  ● in use  ▲ hot  ✗ lost"
TALLEST = 4  # in lines: utilisation; memory; temperature and power; holder
_LEAST_WIDTH = 10  # width, in cells: index, two signs, utilisation and the gap to the next tile
_OF_A_NODE = 8  # GPUs per machine; a row of tiles shows whole machines
# Upper limits of utilisation in percent, each with the shade for values below it.
_SHADES = ((5, " load0"), (25, " load1"), (50, " load2"), (75, " load3"), (math.inf, " load4"))


def map_grid(count: int, width: int, space: int) -> CardGrid:
    """Return the grid for `count` tiles, as tall as `space` lines allow. Each row shows whole machines if they fit."""
    fitting = max(1, width // _LEAST_WIDTH)
    columns = fitting // _OF_A_NODE * _OF_A_NODE or fitting
    if -(-count // columns) > space:
        columns = fitting
    columns = max(1, min(columns, count))
    bands = -(-count // columns)
    return CardGrid(columns, max(1, min(TALLEST, space // max(1, bands))), bands)


def map_lines(rows: Sequence[GpuRow], width: int, grid: CardGrid) -> list[Line]:
    """Return the tiles arranged in the grid."""
    each = max(1, width // grid.columns)
    gap = " " if grid.columns > 1 else ""
    lines: list[Line] = []
    for start in range(0, len(rows), grid.columns):
        tiles = [_tile(row, each - len(gap), grid.height) for row in rows[start : start + grid.columns]]
        lines += [tuple(span for tile in tiles for span in (*tile[y], (gap, "text"))) for y in range(grid.height)]
    return lines


def _tile(row: GpuRow, width: int, height: int) -> list[Line]:
    """Return a GPU in 1 to 4 lines; for an unhealthy GPU, all lines but the first show the reason."""
    below = _figures(row, width) if row.sample.healthy else _reason(row, width, height - 1)
    return [_first(row, width), *below[: height - 1], *[blank(width)] * (height - 1 - len(below))]


def _figures(row: GpuRow, width: int) -> list[Line]:
    """Return the lines for memory, for temperature and power, and for the holder."""
    full, used = MEMORY.cell(row)[0], memory_share(row.sample)
    memory = full if len(full) < width else f"mem {percent(None if used is None else 100 * used)}"
    drawn = _short(row, POWER)
    others = [(f" {text}", "dim") for one in OTHERS if (text := _short(row, one))]
    warm, style = TEMPERATURE.cell(row)
    left = fitting([(warm[:width], style), *others], max(len(warm[:width]), width - len(drawn) - 1))
    return [
        ((fit(memory, width, right=True), row.load("memory_used_bytes")),),
        (*left, (fit(drawn, width - sum(len(text) for text, _ in left), right=True), row.load("power_w"))),
        # Omit "used by", because the sign already shows that another process is using the GPU.
        ((fit(row.holder.removeprefix("used by "), width), row.holder_style),),
    ]


def _short(row: GpuRow, column: GpuColumn) -> str:
    """Return the cell text without spaces, or "" if the value is unknown."""
    return column.cell(row)[0].replace(" ", "").replace(UNKNOWN, "")


def _reason(row: GpuRow, width: int, height: int) -> list[Line]:
    """Return lines that say since when a GPU has been unreadable, and why."""
    words, style = row.fault
    words = words[2:].removeprefix("since ")
    lines = textwrap.wrap(words, max(1, width), max_lines=height, placeholder="…") if height and width else []
    return [((fit(line, width), style),) for line in lines]


def _first(row: GpuRow, width: int) -> Line:
    """Return index, signs and utilisation on a shaded background. Under the cursor, the tile's colours are swapped."""
    sample = row.sample
    shade = " swapped" if row.has_cursor else _shade(sample)
    index = f"{sample.index:>3}"
    if width < len(index) + 2:
        return ((fit(f"{sample.index}", width), f"title{shade}"),)
    sign, style = _sign(row)
    is_hot = sample.healthy and row.load("temperature_c") == "high"
    value = UTILIZATION.cell(row)[0] if sample.healthy else UNKNOWN
    return (
        (index, f"title{shade}"),
        (sign, f"{style}{shade}"),
        (("▲", f"bad{shade}") if is_hot else (" ", f"text{shade}")),
        (fit(value, width - len(index) - 2, right=True), f"text{shade}"),
    )


def _sign(row: GpuRow) -> Span:
    """Return the sign for a GPU: used by a job, used by another process, free (blank), or unhealthy."""
    if not row.sample.healthy:
        return "✗", "bad"
    is_idle_job = row.holder_style == "warn" and row.holder.startswith("job")
    sign = "▶" if is_idle_job else {"good": "▶", "warn": "●", "text": "●"}.get(row.holder_style, " ")
    return sign, row.holder_style


def _shade(sample: GpuSample) -> str:
    used = sample.utilization
    if used is None or not sample.healthy:
        return ""
    return next(style for top, style in _SHADES if used < top)

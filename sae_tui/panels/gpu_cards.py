"""The card view for GPUs: 2 to 6 lines per GPU, in as many columns as fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from sae_tui.format import fit
from sae_tui.gpu.aggregate import HOTTEST_C
from sae_tui.gpu.base import GpuSample
from sae_tui.panels.gpu_row import (
    MEMORY,
    OTHERS,
    POWER,
    TEMPERATURE,
    UTILIZATION,
    GpuColumn,
    GpuRow,
    Meter,
    blank,
    fill,
    fitting,
    history,
    meter_bar,
    short_name,
)
from sae_tui.widgets.lines import Line, Span

CARD_WIDTH = 38
TALLEST = 6  # in lines: heading; utilisation, memory, power and temperature; other sensors or a blank line
_LABEL = 7  # cells
_NARROW, _WIDE = 32, 50  # the card widths with a short bar, and with a long one
_GAP = 2  # cells between two GPUs


# The meters for the quantities that the line view shows without a history.
_METERS = {
    POWER: Meter("power_w", "bar", lambda sample: sample.power_limit_w),
    TEMPERATURE: Meter("temperature_c", "heat", lambda _: HOTTEST_C),
}


@dataclass(frozen=True, slots=True)
class CardGrid:
    """The card view grid: `bands` rows of `columns` GPUs, each GPU `height` lines tall."""

    columns: int
    height: int
    bands: int

    def count_fitting(self, space: int) -> int:
        """Return how many bands fit into `space` lines. If some do not fit, one line is reserved for a note."""
        fitting = space // self.height
        return self.bands if fitting >= self.bands else max(1, (space - 1) // self.height)


def card_grid(count: int, width: int, space: int) -> CardGrid:
    """Return the card view grid. Each GPU gets as many lines as the space allows, from 2 to `TALLEST`.

    The GPUs are spread evenly: four GPUs are shown in two rows of two, not as three and one.
    """
    bands = max(1, -(-count // max(1, width // CARD_WIDTH)))
    columns = max(1, -(-count // bands))
    return CardGrid(columns, max(2, min(TALLEST, space // bands)), bands)


def card_lines(rows: Sequence[GpuRow], width: int, grid: CardGrid) -> list[Line]:
    """Return the card view lines, with the GPUs arranged in the grid."""
    card_width = width // grid.columns
    lines: list[Line] = []
    for start in range(0, len(rows), grid.columns):
        cards = [card(row, card_width - _GAP, grid.height) for row in rows[start : start + grid.columns]]
        lines += [_joined([one[y] for one in cards], card_width) for y in range(grid.height)]
    return lines


def card(row: GpuRow, width: int, height: int) -> list[Line]:
    """Return a GPU in 2 to 6 lines; even 2 lines include utilisation, memory, power and temperature."""
    sample = row.sample
    if not sample.healthy:
        return _unhealthy(row, width, height)
    heading, util = _heading(row, width), _card_row(row, UTILIZATION, width)
    if height <= 3:
        return [heading, _figures(row, width)] if height == 2 else [heading, util, _figures(row, width, util=False)]
    first, others = [heading, util, _card_row(row, MEMORY, width)], [_with_limit(row, one) for one in OTHERS]
    if height < TALLEST:
        warmth = (_figure(row, TEMPERATURE, 1), _with_limit(row, POWER), *others)
        return [*first, fill(fitting(warmth, width), width), *[blank(width)] * (height > 4)]
    return [
        *first,
        _card_row(row, POWER, width),
        _card_row(row, TEMPERATURE, width),
        fill(fitting(others, width), width),
    ]


def _figures(row: GpuRow, width: int, *, util: bool = True) -> Line:
    """Return all values in one line, with a history if it fits."""
    first = _figure(row, UTILIZATION) if util else (fit(_label(MEMORY), UTILIZATION.width), "label")
    usual = first, _figure(row, MEMORY, 1), _figure(row, TEMPERATURE, 2), _figure(row, POWER, 2)
    space = width - 1 - sum(cell_len(text) for text, _ in usual)
    figures: Line = (*usual, *fitting([_figure(row, one, 2) for one in OTHERS], space), (" ", "text"))
    meter = UTILIZATION.meter if util else MEMORY.meter
    assert meter
    return (*figures, _spark(row, meter, width - sum(cell_len(text) for text, _ in figures)))


def _figure(row: GpuRow, column: GpuColumn, gap: int = 0) -> Span:
    """Return the cell for a column, preceded by a gap."""
    text, style = column.cell(row)
    return fit(text, gap + column.width, right=True), style


def _with_limit(row: GpuRow, column: GpuColumn) -> Span:
    """Return the cell for a column with its limit, preceded by a gap, like ` 120 W / 350 W`."""
    (text, style), width = column.cell(row), column.width
    if column.limit:
        width += len(" / ") + column.width
        text = " / ".join(filter(None, (text, column.limit(row.sample))))
    return "  " + fit(text, width), style


def _unhealthy(row: GpuRow, width: int, height: int) -> list[Line]:
    """Return the heading of an unhealthy GPU, followed by the wrapped reason in the remaining lines."""
    sample = row.sample
    words, style = row.fault
    texts = textwrap.wrap(words[2:], max(10, width - 3), max_lines=height - 1, placeholder=" …")
    reason = [((fit(f" {' ' if place else words[0]} {text}", width), style),) for place, text in enumerate(texts)]
    return [((fit(_name(sample), width), f"title{row.mark}"),), *reason, *[blank(width)] * (height - 1 - len(reason))]


def _name(sample: GpuSample) -> str:
    return f" GPU {sample.index} {short_name(sample.name)} "


def _heading(row: GpuRow, width: int) -> Line:
    name = _name(row.sample)
    holder_width = max(0, width - len(name))
    return (
        (fit(name, width - holder_width), f"title{row.mark}"),
        (fit(row.holder, holder_width, right=True), row.holder_style),
    )


def _label(column: GpuColumn) -> str:
    return f" {column.heading.lower()} "


def _card_row(row: GpuRow, column: GpuColumn, width: int) -> Line:
    """Return a quantity as a line with its label, value, bar and history."""
    meter = column.meter or _METERS[column]
    text, style = column.cell(row)
    line = (
        (fit(_label(column), _LABEL), "label"),
        (fit(text, MEMORY.width, right=True) + " ", style),
        *meter_bar(row, meter, 0 if width < _NARROW else 8 if width < _WIDE else 12),
    )
    # The history extends into the gap to the next card.
    space = width + _GAP - 1 - sum(cell_len(words) for words, _ in line)
    return (*line, _spark(row, meter, space), (" ", "text"))


def _joined(lines: Sequence[Line], width: int) -> Line:
    spans: list[Span] = []
    for line in lines:
        used = sum(cell_len(text) for text, _ in line)
        spans += [*line, (" " * (width - used), "text")]
    return tuple(spans)


def _spark(row: GpuRow, meter: Meter, width: int) -> Span:
    return (history(row, meter, max(0, width), 1)[0], meter.style)

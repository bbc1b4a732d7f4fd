"""GPUs as lines, one or two per GPU, with the same columns for all GPUs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len

from sae_tui.format import fit, wrap
from sae_tui.panels.gpu_row import (
    GPU_COLUMNS,
    HOLDER,
    INDEX,
    NAME,
    POWER,
    GpuColumn,
    GpuRow,
    blank,
    history,
    meter_bar,
    processes,
)
from sae_tui.widgets.area import shaded
from sae_tui.widgets.lines import Line, Span

LEAST_HISTORY = 12  # cells; a shorter history is not useful
_SHORTEST_NAME = 4  # cells
_MARGIN = 1  # width of the right margin, in cells
_ERROR_TOLD_S = 3600.0
_LONG_WORD = 8  # words are not split, so the first of two lines may be up to this many cells shorter than the second
_NARROW_HISTORY = 10  # columns with a `drop`, except power, are shown only if this many cells remain for the history
_WIDE_BAR, _BAR = 10, 6
_WIDE_HOLDER, _HOLDER = 24, 13


@dataclass(frozen=True, slots=True)
class LineLayout:
    """The widths of the columns that fit, of a bar, of the history after each meter, and of the gap after a history."""

    widths: Mapping[GpuColumn, int]
    bar: int
    histories: Sequence[int]
    gap: int


def gpu_lines(rows: Sequence[GpuRow], of: Sequence[GpuRow], width: int, each: int = 1) -> list[Line]:
    """Return `each` lines, one or two, for each GPU in `rows`; a fault replaces the GPU's values.

    The column widths are chosen for all GPUs in `of`, so that columns do not shift while the user scrolls. On a narrow
    terminal, bars, histories and the least important columns are omitted.
    """
    longest = max((cell_len(row.holder) for row in of if row.sample.healthy), default=0)
    if each > 1:
        longest = longest // 2 + _LONG_WORD
    layout = layout_of(width, longest)
    return [line for row in rows for line in _lines_of(row, layout, width, each)]


def _lines_of(row: GpuRow, layout: LineLayout, width: int, each: int) -> list[Line]:
    """Return a GPU in one or two lines.

    The second line contains the lower half of the histories, the power limit, and the rest of the holder's name. If the
    entire name fits into the first line, the second shows the processes on the GPU.
    """
    if not row.sample.healthy:
        head = tuple(_cell(row, column, layout.widths[column]) for column in (INDEX, NAME))
        words, style = row.fault
        used = sum(cell_len(text) for text, _ in head)
        return [(*head, (fit(words, max(0, width - used)), style)), *[blank(width)] * (each - 1)]
    meters = [column.meter for column in layout.widths if column.meter]
    pairs = zip(meters, layout.histories, strict=True)
    histories = {one.name: shaded(history(row, one, cells, each), one.style) for one, cells in pairs}
    if each == 1:
        return [_first(row, layout, histories)]
    who, *more = wrap(row.holder, layout.widths.get(HOLDER, 0)) or [""]
    return [_first(replace(row, holder=who), layout, histories), _second(row, layout, histories, " ".join(more))]


def _first(row: GpuRow, layout: LineLayout, histories: Mapping[str, Sequence[Span]]) -> Line:
    spans: list[Span] = []
    for column, width in layout.widths.items():
        spans.append(_cell(row, column, width))
        if meter := column.meter:
            spans += (*meter_bar(row, meter, layout.bar), histories[meter.name][0], (" " * layout.gap, "text"))
    return tuple(spans)


def _cell(row: GpuRow, column: GpuColumn, width: int) -> Span:
    text, style = column.cell(row)
    return fit(text, width, right=column.right) + " " * column.gap, style


def _second(row: GpuRow, layout: LineLayout, histories: Mapping[str, Sequence[Span]], rest: str) -> Line:
    spans: list[Span] = []
    carried = 0  # total width of the preceding columns without text in this line
    for column, width in layout.widths.items():
        if column is HOLDER:
            break
        carried += width + (layout.bar + bool(layout.bar) if column.meter else 0)
        if column.below is None:
            carried += column.gap
            continue
        spans.append((fit(column.below(row.sample), carried, right=column.right) + " " * column.gap, "dim"))
        carried = 0
        if meter := column.meter:
            spans += (histories[meter.name][1], (" " * layout.gap, "text"))
    below, style = _below(row, rest)
    return (*spans, (" " * carried + fit(below, layout.widths.get(HOLDER, 0)), style))


def _below(row: GpuRow, rest: str) -> tuple[str, str]:
    """Return the text to show below the holder's name, and its style.

    The text is the first of these that exists: an error from the last hour, the cause of throttling, the rest of the
    holder's name, the processes.
    """
    condition = row.sample.condition
    if condition and condition.xid and time.time() - condition.xid.timestamp < _ERROR_TOLD_S:
        return condition.xid.words, "bad"
    slowed = condition.slowed_by if condition else ()
    if slowed:
        return f"slowed: {'; '.join(slowed)}", "warn"
    return (rest, row.holder_style) if rest else (processes(row.sample), "dim")


def layout_of(width: int, longest: int) -> LineLayout:
    """Return the layout for lines of `width` cells; the longest holder description takes `longest` cells."""
    columns = list(GPU_COLUMNS)
    while (last := max(columns, key=lambda column: column.drop)).drop and _least(columns, last) > width:
        columns.remove(last)
    widths = {column: column.width for column in columns}
    n_meters = sum(column.meter is not None for column in columns)
    spare = width - _total(columns)
    if HOLDER not in columns:
        widths[NAME] = max(_SHORTEST_NAME, NAME.width + min(0, spare))
        return LineLayout(widths, 0, (max(0, spare), *[0] * (n_meters - 1)), 1)
    spare += HOLDER.width
    bar, holder = _bar_and_holder(spare, n_meters, longest)
    if spare - holder < LEAST_HISTORY:
        return LineLayout(widths | {HOLDER: spare + n_meters}, bar, [0] * n_meters, 0)
    spare -= n_meters * (bar + bool(bar))
    holder = min(max(holder, longest), spare - LEAST_HISTORY)
    n_shown = min(n_meters, (spare - holder) // LEAST_HISTORY)
    cells = [(spare - holder + place) // n_shown if place < n_shown else 0 for place in range(n_meters)]
    return LineLayout(widths | {HOLDER: holder}, bar, cells, 1)


def _least(columns: Sequence[GpuColumn], last: GpuColumn) -> int:
    """Return the width below which the column `last` is dropped: power is more useful than a history or a long name."""
    return _total(columns) + (_SHORTEST_NAME - NAME.width if last is POWER else _NARROW_HISTORY)


def _bar_and_holder(space: int, n_meters: int, longest: int) -> tuple[int, int]:
    """Return the best bar width and the minimum holder column width that leave space for a history.

    On a narrow terminal, histories are more useful than bars and full user names.
    """
    choices = ((_WIDE_BAR, max(_WIDE_HOLDER, longest)), (_BAR, _WIDE_HOLDER), (_BAR, _HOLDER))
    fitting = (one for one in choices if n_meters * (one[0] + 1) + one[1] + LEAST_HISTORY <= space)
    return next(fitting, (0, HOLDER.width))


def _total(columns: Sequence[GpuColumn]) -> int:
    """Return the total width of the columns, with a gap after each history and the margin."""
    return sum(column.width + column.gap + (column.meter is not None) for column in columns) + _MARGIN

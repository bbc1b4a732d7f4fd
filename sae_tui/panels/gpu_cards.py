"""GPUs in a card view: 2 to 5 lines per GPU, in as many columns as fit."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from sae_tui.format import celsius, fit, percent, watts
from sae_tui.gpu.base import GpuSample
from sae_tui.panels.gpu_row import GpuRow, blank, heat, history, memory_short, meter, power, share_of, short_name
from sae_tui.widgets.lines import Line, Span

CARD_WIDTH = 38


@dataclass(frozen=True, slots=True)
class CardGrid:
    """GPUs side by side in `columns`, in bands of `height` lines below each other."""

    columns: int
    height: int
    bands: int

    def count_fitting(self, space: int) -> int:
        """Return how many bands fit into `space` lines; if not all fit, one line is reserved to count the rest."""
        fitting = space // self.height
        return self.bands if fitting >= self.bands else max(1, (space - 1) // self.height)


def card_grid(count: int, width: int, space: int) -> CardGrid:
    """Return the grid of the card view; each GPU gets as many lines as the space allows, from 2 to 5."""
    columns = max(1, min(count, width // CARD_WIDTH))
    bands = -(-count // columns)
    return CardGrid(columns, max(2, min(5, space // max(1, bands))), bands)


def card_lines(rows: Sequence[GpuRow], width: int, grid: CardGrid) -> list[Line]:
    """Return the cards side by side and below each other."""
    card_width = width // grid.columns
    lines: list[Line] = []
    for start in range(0, len(rows), grid.columns):
        cards = [card(row, card_width - 2, grid.height) for row in rows[start : start + grid.columns]]
        lines += [_beside([one[y] for one in cards], card_width) for y in range(grid.height)]
    return lines


def card(row: GpuRow, width: int, height: int) -> list[Line]:
    """Return a GPU in 2 to 5 lines: heading, utilisation, memory, temperature and power, and a blank line."""
    sample = row.sample
    if not sample.healthy:
        return _unhealthy(row, width, height)
    heading = _heading(row, width)
    warmth = (
        (fit(celsius(sample.temperature_c), 6, right=True), heat(sample)),
        (fit(f"  {power(sample)}", 16), "text"),
    )
    util = _card_row(row, "util", percent(sample.utilization), "utilization", 100, width, "spark", "spark")
    memory = _card_row(
        row, "mem", memory_short(sample), "memory_used_bytes", sample.memory_total_bytes, width, "memory", "memory"
    )
    last = (*warmth, (" " * max(0, width - 22), "text"))
    return {2: [heading, _figures(row, width)], 3: [heading, util, _figures(row, width, util=False)]}.get(
        height, [heading, util, memory, last, *[blank(width)] * (height > 4)]
    )


def _figures(row: GpuRow, width: int, *, util: bool = True) -> Line:
    """Return all figures on one line, with a history if it fits."""
    sample = row.sample
    figures: Line = (
        (fit(percent(sample.utilization), 5, right=True) if util else " mem ", "text" if util else "label"),
        (fit(memory_short(sample), 12, right=True), "text"),
        (fit(celsius(sample.temperature_c), 7, right=True), heat(sample)),
        (fit(watts(sample.power_w), 8, right=True) + " ", "text"),
    )
    space = max(0, width - 33)
    name, top, style = (
        ("utilization", 100, "spark") if util else ("memory_used_bytes", sample.memory_total_bytes, "memory")
    )
    return (*figures, _spark(row, name, space, top, style))


def _unhealthy(row: GpuRow, width: int, height: int) -> list[Line]:
    """Return the heading, and the reason wrapped into the remaining lines."""
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


def _card_row(
    row: GpuRow, label: str, text: str, name: str, top: float | None, width: int, bar_style: str, spark_style: str
) -> Line:
    share = share_of(getattr(row.sample, name), top)
    bar_width = 8 if width < 50 else 12
    spark_width = max(0, width - 6 - 10 - bar_width - 2)
    return (
        (fit(f" {label}", 6), "label"),
        *meter(text, 10, share, bar_width, bar_style),
        (" ", "text"),
        _spark(row, name, spark_width, top, spark_style),
        (" ", "text"),
    )


def _beside(lines: Sequence[Line], width: int) -> Line:
    spans: list[Span] = []
    for line in lines:
        used = sum(cell_len(text) for text, _ in line)
        spans += [*line, (" " * (width - used), "text")]
    return tuple(spans)


def _spark(row: GpuRow, name: str, width: int, top: float | None, style: str) -> Span:
    return (history(row, name, width, top, 1)[0], style)

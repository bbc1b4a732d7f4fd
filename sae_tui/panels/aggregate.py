"""All GPUs as one: memory, utilisation, power and the hottest card, each with its history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.events import Resize

from sae_tui.format import UNKNOWN, bar, celsius, count, fit, percent, sparkline, tall_sparkline, watts
from sae_tui.gpu.aggregate import HOTTEST_C, aggregate, shares
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.past import Past
from sae_tui.widgets.lines import Line, LineView

_AXIS = 5  # cells for the numbers left of a plot
_GAP = 2  # cells between two plots
_TALL = 5  # rows from which an axis has its middle


@dataclass(frozen=True, slots=True)
class Total:
    """One aggregated quantity: its text, how many cards report it, and its share of the total, now and before."""

    label: str
    title: str
    text: str
    counted: int
    gpu_count: int
    share: float | None
    history: Sequence[float | None]
    style: str
    # Where the axis ends, in the unit of the text.
    ceiling: float | None = None

    def words(self, *, short: bool) -> str:
        """Return `298.7 / 842.4 GiB · 6 of 8 cards`, if short `298.7 / 842.4 GiB · 6 of 8`; no count if of all."""
        if self.counted in (0, self.gpu_count):
            return self.text
        part = f"{self.counted} of {self.gpu_count}"
        return f"{self.text} · {part}" if short else f"{self.text} · {part} cards"


class AggregatePanel(LineView):
    """Four quantities: a line each, or four plots, two beside two."""

    _plot = 0
    _totals: tuple[Total, ...] = ()

    def show_totals(self, totals: Sequence[Total], *, plot: int = 0) -> None:
        """Draw the quantities as plots of `plot` rows each, or where that is 0 as a line each."""
        self._totals, self._plot = tuple(totals), plot
        self._draw()

    def on_mount(self) -> None:
        self._totals = ()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.width
        if not width:
            return
        if self._plot:
            self.show(plots(self._totals, width, self._plot))
            return
        words = [total.words(short=width < 100) for total in self._totals]
        text_width = max([24 if width >= 60 else 16, *(cell_len(text) + 1 for text in words)])
        self.show([_line(total, fit(text, text_width), width) for total, text in zip(self._totals, words, strict=True)])


def _line(total: Total, text: str, width: int) -> Line:
    bar_width = 10 if width >= 60 else 0
    spark_width = max(0, width - 7 - cell_len(text) - bar_width - 2)
    return (
        (fit(f" {total.label}", 7), "label"),
        (text, "title"),
        (bar(total.share, bar_width), f"{total.style} rail"),
        (" ", "text"),
        (sparkline(total.history, spark_width, 1.0), total.style),
    )


def plots(totals: Sequence[Total], width: int, height: int) -> list[Line]:
    """Return the quantities as plots of `height` rows, each with a heading, in two columns."""
    each = (width - _GAP) // 2
    lines: list[Line] = []
    for left, right in zip(totals[::2], totals[1::2], strict=True):
        beside = _plot_lines(left, each, height), _plot_lines(right, width - _GAP - each, height)
        lines += [(*one, (" " * _GAP, "text"), *other) for one, other in zip(*beside, strict=True)]
    return lines


def _plot_lines(total: Total, width: int, height: int) -> list[Line]:
    """Return the heading with the value now, and the history over its axis from 0 to what there is."""
    text = total.words(short=width < 50)
    heading: Line = (
        (f" {total.title} ", "label"),
        (fit(text, max(0, width - cell_len(total.title) - 2)), "title"),
    )
    labels = _axis(total.ceiling, height)
    history = tall_sparkline(total.history, max(0, width - _AXIS - 2), height, 1.0)
    body = [
        ((fit(label, _AXIS, right=True) + ("┤" if label else "│"), "dim"), (row, total.style), (" ", "text"))
        for label, row in zip(labels, history, strict=True)
    ]
    return [heading, *body]


def _axis(ceiling: float | None, height: int) -> list[str]:
    """Return a label for each row of an axis that begins with 0: its ends, and its middle where there is room."""
    if not ceiling:
        return [""] * height
    labels = [count(ceiling), *[""] * (height - 2), "0"]
    if height >= _TALL and height % 2:
        labels[height // 2] = count(ceiling / 2)
    return labels


def totals(samples: Sequence[GpuSample], past: Past) -> list[Total]:
    """Return memory, utilisation, power and temperature of the cards that report them, each with its history."""
    now, before, of = aggregate(samples), shares(past), len(samples)
    used, total = now.total_memory_used_bytes, now.total_memory_total_bytes
    memory = f"{(used or 0) / 2**30:.1f} / {total / 2**30:.1f} GiB" if total else UNKNOWN
    busy = now.average_utilization
    power, limit = now.total_power_w, now.total_power_limit_w
    heat = now.hottest.temperature_c if now.hottest else None
    hot = f"{celsius(heat)} GPU {now.hottest.index}" if now.hottest else UNKNOWN
    drawn = f"{watts(power)} / {watts(limit)}"
    counted = now.counted
    most_gib = total / 2**30 if total else None
    return [
        Total("VRAM", "Memory", memory, counted.memory, of, _share(used, total), before.memory, "memory", most_gib),
        Total("Util", "Utilisation", f"{percent(busy)} average", counted.utilization, of, _share(busy, 100),
              before.utilization, "spark", 100),
        Total("Power", "Power", drawn, counted.power, of, _share(power, limit), before.power, "bar", limit),
        Total("Temp", "Hottest", hot, counted.temperature, of, _share(heat, HOTTEST_C), before.temperature, "heat",
              HOTTEST_C),
    ]  # fmt: skip


def _share(now: float | None, top: float | None) -> float | None:
    return now / top if now is not None and top else None

"""Totals over all GPUs: memory, utilisation, power and the hottest GPU, each with its history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.events import Resize

from sae_tui.format import UNKNOWN, bar, celsius, fit, percent, sparkline, watts
from sae_tui.gpu.aggregate import HOTTEST_C, aggregate, shares
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.past import RecentHistory
from sae_tui.panels.load import heat_style, share_of, share_style
from sae_tui.settings import Settings
from sae_tui.widgets.area import area, columns_of, side_by_side, with_marks
from sae_tui.widgets.lines import Line, LineView

_GAP = 2  # cells between two plots


@dataclass(frozen=True, slots=True)
class Total:
    """An aggregated quantity: its text, the number of GPUs reporting it, its share of the maximum, and its history."""

    label: str
    title: str
    text: str
    counted: int
    gpu_count: int
    share: float | None
    history: Sequence[float | None]
    style: str
    load: str = "text"  # the style for the load
    # The upper end of the axis, in the same unit as the text.
    ceiling: float | None = None

    def words(self, *, short: bool) -> str:
        """Return text like `298.7 / 842.4 GiB · 6 of 8 GPUs`; if `short`, omit `GPUs`.

        The count is omitted if all GPUs report the quantity.
        """
        if self.counted in (0, self.gpu_count):
            return self.text
        part = f"{self.counted} of {self.gpu_count}"
        return f"{self.text} · {part}" if short else f"{self.text} · {part} GPUs"


class AggregatePanel(LineView):
    """Shows four quantities, either as one line each or as plots in a two-by-two grid."""

    _plot = 0
    _span_s = _step_s = 0.0
    _totals: tuple[Total, ...] = ()

    def show_totals(
        self, totals: Sequence[Total], *, plot: int = 0, span_s: float | None = None, step_s: float = 0.0
    ) -> None:
        """Draw the quantities as plots of `plot` rows each, or as one line each if `plot` is 0.

        The plots' time marks assume that a plot covers `span_s` or, if that is None, `step_s` per column.
        """
        self._totals, self._plot, self._span_s, self._step_s = tuple(totals), plot, span_s or 0.0, step_s
        self._draw()

    @property
    def n_columns(self) -> int:
        """The number of intervals in each plot, or 0 if the quantities are drawn as lines."""
        return columns_of((self.width - _GAP) // 2) if self._plot else 0

    def on_mount(self) -> None:
        self._totals = ()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.width
        if not width:
            return
        if self._plot:
            self.show(plots(self._totals, width, self._plot, self._span_s or self._step_s * self.n_columns))
            return
        words = [total.words(short=width < 100) for total in self._totals]
        text_width = max([24 if width >= 60 else 16, *(cell_len(text) + 1 for text in words)])
        self.show([_line(total, fit(text, text_width), width) for total, text in zip(self._totals, words, strict=True)])


def _line(total: Total, text: str, width: int) -> Line:
    bar_width = 10 if width >= 60 else 0
    spark_width = max(0, width - 7 - cell_len(text) - bar_width - 2)
    return (
        (fit(f" {total.label}", 7), "label"),
        (text, f"title {total.load}"),
        (bar(total.share, bar_width), f"{total.load} rail"),
        (" ", "text"),
        (sparkline(total.history, spark_width, 1.0), total.style),
    )


def plots(totals: Sequence[Total], width: int, height: int, span_s: float) -> list[Line]:
    """Return the quantities as plots of `height` rows, each with a heading, in two columns.

    The plots cover `span_s` seconds.
    """
    left = (width - _GAP) // 2
    busy = next((one.history for one in totals if one.label == "Util"), ())
    areas = [
        _area(one, left if place % 2 == 0 else width - _GAP - left, height, busy, span_s)
        for place, one in enumerate(totals)
    ]
    return [line for pair in zip(areas[::2], areas[1::2], strict=True) for line in side_by_side(*pair, _GAP)]


def _area(total: Total, width: int, height: int, others: Sequence[float | None], span_s: float) -> list[Line]:
    text = total.words(short=width < 50)
    space = max(0, width - cell_len(total.title) - 2)
    text = text if cell_len(text) <= space else fit(text, space)
    heading = with_marks(((f" {total.title} ", "label"), (text, f"title {total.load}")), width, span_s)
    return area(
        heading, total.history, style=total.style, ceiling=total.ceiling, width=width, height=height, others=others
    )


def totals(samples: Sequence[GpuSample], past: RecentHistory, settings: Settings) -> list[Total]:
    """Return memory, utilisation, power and temperature of the GPUs reporting them, each with its history.

    `settings` contains the thresholds for their colours.
    """
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
    shares_of = share_of(used, total), share_of(busy, 100), share_of(power, limit)
    thresholds = settings.colour_memory_percent, settings.colour_util_percent, settings.colour_power_percent
    memory_load, busy_load, power_load = (share_style(*each) for each in zip(shares_of, thresholds, strict=True))
    hot_load = heat_style(now.hottest, settings) if now.hottest else "text"
    return [
        Total("VRAM", "Memory", memory, counted.memory, of, shares_of[0],
              before.memory, "memory", memory_load, most_gib),
        Total("Util", "Utilisation", f"{percent(busy)} average", counted.utilization, of, shares_of[1],
              before.utilization, "spark", busy_load, 100),
        Total("Power", "Power", drawn, counted.power, of, shares_of[2], before.power, "bar", power_load, limit),
        Total("Temp", "Hottest", hot, counted.temperature, of, share_of(heat, HOTTEST_C), before.temperature, "heat",
              hot_load, HOTTEST_C),
    ]  # fmt: skip

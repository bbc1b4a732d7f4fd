"""All GPUs as one: memory, utilisation, power and the hottest card, each with its history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from textual.events import Resize

from sae_tui.format import UNKNOWN, bar, celsius, fit, percent, tall_sparkline, watts
from sae_tui.gpu.aggregate import HOTTEST_C, aggregate, shares
from sae_tui.gpu.base import GpuSample
from sae_tui.gpu.past import Past
from sae_tui.widgets.lines import Line, LineView


@dataclass(frozen=True, slots=True)
class Total:
    """One aggregated quantity: its text, how many cards report it, and its share of the total, now and before."""

    label: str
    text: str
    counted: int
    gpu_count: int
    share: float | None
    history: Sequence[float | None]
    style: str

    def words(self, *, short: bool) -> str:
        """Return `298.7 / 842.4 GiB · 6 of 8 cards`, if short `298.7 / 842.4 GiB · 6 of 8`; no count if of all."""
        if self.counted in (0, self.gpu_count):
            return self.text
        part = f"{self.counted} of {self.gpu_count}"
        return f"{self.text} · {part}" if short else f"{self.text} · {part} cards"


class AggregatePanel(LineView):
    """Four quantities, as many rows each as the screen has room for."""

    rows_each = 1
    _totals: tuple[Total, ...] = ()

    def show_totals(self, totals: Sequence[Total], *, rows_each: int = 1) -> None:
        self._totals = tuple(totals)
        self.rows_each = rows_each
        self._draw()

    def on_mount(self) -> None:
        self._totals = ()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.width
        if width:
            words = [total.words(short=width < 100) for total in self._totals]
            text_width = max([24 if width >= 60 else 16, *(cell_len(text) + 1 for text in words)])
            self.show(
                [
                    line
                    for total, text in zip(self._totals, words, strict=True)
                    for line in _lines(total, fit(text, text_width), width, self.rows_each)
                ]
            )


def _lines(total: Total, text: str, width: int, height: int) -> list[Line]:
    bar_width = 10 if width >= 60 else 0
    spark_width = max(0, width - 7 - cell_len(text) - bar_width - 2)
    rows = tall_sparkline(total.history, spark_width, height, 1.0)
    first: Line = (
        (fit(f" {total.label}", 7), "label"),
        (text, "title"),
        (bar(total.share, bar_width), f"{total.style} trough"),
        (" ", "text"),
        (rows[0], total.style),
    )
    indent = " " * (width - spark_width - 1)
    return [first, *(((indent, "text"), (row, total.style)) for row in rows[1:])]


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
    return [
        Total("VRAM", memory, counted.memory, of, _share(used, total), before.memory, "memory"),
        Total(
            "Util", f"{percent(busy)} average", counted.utilization, of, _share(busy, 100), before.utilization, "spark"
        ),
        Total("Power", drawn, counted.power, of, _share(power, limit), before.power, "bar"),
        Total("Temp", hot, counted.temperature, of, _share(heat, HOTTEST_C), before.temperature, "accent"),
    ]


def _share(now: float | None, top: float | None) -> float | None:
    return now / top if now is not None and top else None

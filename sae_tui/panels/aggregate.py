"""All GPUs as one: memory, utilisation, power and the hottest card, each with its history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from textual.events import Resize

from sae_tui.format import UNKNOWN, bar, celsius, fit, percent, tall_sparkline, watts
from sae_tui.gpu.aggregate import aggregate
from sae_tui.gpu.base import GpuSample
from sae_tui.widgets.lines import Line, LineView

Column = Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Total:
    """One aggregated quantity: what it is now, out of what, and its history on a fixed axis."""

    label: str
    text: str
    now: float | None
    top: float | None
    history: Column
    style: str

    @property
    def share(self) -> float | None:
        return self.now / self.top if self.now is not None and self.top else None


class AggregatePanel(LineView):
    """Four quantities, as many rows each as the screen has room for."""

    rows_each = 1

    def show_totals(self, totals: Sequence[Total], *, rows_each: int = 1) -> None:
        self._totals = tuple(totals)
        self.rows_each = rows_each
        self._draw()

    def on_mount(self) -> None:
        self._totals: tuple[Total, ...] = ()

    def on_resize(self, _: Resize) -> None:
        self._draw()

    def _draw(self) -> None:
        width = self.width
        if width:
            self.show([line for total in self._totals for line in _lines(total, width, self.rows_each)])


def _lines(total: Total, width: int, height: int) -> list[Line]:
    text_width, bar_width = (24, 10) if width >= 60 else (16, 0)
    spark_width = max(0, width - 7 - text_width - bar_width - 2)
    rows = tall_sparkline(total.history, spark_width, height, total.top)
    first: Line = (
        (fit(f" {total.label}", 7), "label"),
        (fit(total.text, text_width), "title"),
        (bar(total.share, bar_width), f"{total.style} trough"),
        (" ", "text"),
        (rows[0], total.style),
    )
    indent = " " * (width - spark_width - 1)
    return [first, *(((indent, "text"), (row, total.style)) for row in rows[1:])]


def totals(samples: Sequence[GpuSample], column: Callable[[int, str, int], Column], width: int) -> list[Total]:
    """The four quantities over the healthy cards; `column(index, name, n)` gives a card's history."""
    now = aggregate(samples)

    def history(name: str, combine: Callable[[Iterable[float]], float]) -> Column:
        return combined([column(sample.index, name, width) for sample in samples], combine)

    used, total = now.total_memory_used_bytes, now.total_memory_total_bytes
    memory_text = f"{_gb(used)} / {_gb(total)} GB" if total else UNKNOWN
    heat = now.hottest.temperature_c if now.hottest else None
    hot_text = f"{celsius(heat)} GPU {now.hottest.index}" if now.hottest else UNKNOWN
    power, limit = now.total_power_w, now.total_power_limit_w
    busy = now.average_utilization
    return [
        Total("VRAM", memory_text, used, total, history("memory_used_bytes", sum), "memory"),
        Total("Util", f"{percent(busy)} average", busy, 100.0, history("utilization", mean), "spark"),
        Total("Power", f"{watts(power)} / {watts(limit)}", power, limit, history("power_w", sum), "bar"),
        Total("Temp", hot_text, heat, 100.0, history("temperature_c", max), "accent"),
    ]


def combined(columns: Sequence[Column], combine: Callable[[Iterable[float]], float]) -> Column:
    """The columns as one, aligned at their newest sample; a time at which no card answered is a gap."""
    longest = max(map(len, columns), default=0)
    padded = [[None] * (longest - len(column)) + list(column) for column in columns]
    rows = ([value for value in row if value is not None] for row in zip(*padded, strict=True))
    return [combine(row) if row else None for row in rows]


def mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def _gb(n_bytes: float | None) -> str:
    return f"{(n_bytes or 0) / 2**30:.1f}"

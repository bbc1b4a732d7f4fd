"""All GPUs as one: memory, utilisation, power and the hottest card, each with its history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from textual.events import Resize

from sae_tui.format import bar, celsius, fit, percent, tall_sparkline, watts
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
    alive = [sample for sample in samples if sample.healthy]
    indices = [sample.index for sample in samples]

    def history(name: str, combine: Callable[[Iterable[float]], float]) -> Column:
        return combined([column(index, name, width) for index in indices], combine)

    used, total = _sum(s.memory_used_bytes for s in alive), _sum(s.memory_total_bytes for s in alive)
    busy = _mean(s.utilization for s in alive)
    power, limit = _sum(s.power_w for s in alive), _sum(s.power_limit_w for s in alive)
    hottest = max((s for s in alive if s.temperature_c is not None), key=lambda s: s.temperature_c or 0, default=None)
    memory_text = f"{_gb(used)} / {_gb(total)} GB" if total else percent(None)
    hot_text = f"{celsius(hottest.temperature_c)} GPU {hottest.index}" if hottest else celsius(None)
    return [
        Total("VRAM", memory_text, used, total, history("memory_used_bytes", sum), "memory"),
        Total("Util", f"{percent(busy)} average", busy, 100.0, history("utilization", mean), "spark"),
        Total("Power", f"{watts(power)} / {watts(limit)}", power, limit, history("power_w", sum), "bar"),
        Total("Temp", hot_text, hottest and hottest.temperature_c, 100.0, history("temperature_c", max), "accent"),
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


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def _gb(n_bytes: float | None) -> str:
    return f"{(n_bytes or 0) / 2**30:.1f}"
